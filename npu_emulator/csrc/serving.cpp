// Operators of inference: attention to whole and to paged keys and values, the cache of latent attention, rotary
// embeddings from a table, filters of sampling.
#include <algorithm>
#include <limits>
#include <utility>

#include "attention.h"
#include "headers.h"

using namespace cann;

namespace {

constexpr int64_t kColumn = 16;  // elements of two bytes in 32 bytes, the width of a column in NZ
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// One call of attention for inference. Lengths may be empty: then sequences are whole.
struct Inference {
  Tensor query, query_rope, key_rope, mask, blocks;
  Tensors keys, values;
  Ints query_lengths, key_lengths;
  int64_t heads, key_heads, sparse_mode, block_size;
  double scale;
  std::string layout;
  // Whether each sequence has one query, and the operator serves that too: then sparseMode and windows have no effect.
  bool is_decode = true;
};

// A view as [batch, heads, sequence, size] of a batch in a layout that has one.
Tensor served_heads_first(const Tensor& tensor, const std::string& layout, int64_t heads) {
  if (layout == "BNSD") return tensor;
  if (layout == "BSND") return tensor.transpose(1, 2);
  if (layout == "BSH") return tensor.unflatten(-1, {heads, -1}).transpose(1, 2);
  if (layout == "NBSD") return tensor.transpose(0, 1);
  TORCH_CHECK(false, "input_layout ", layout, " is not emulated");
}

// The first `length` tokens of the sequence in `blocks`, [heads, length, size]. A cache is [blocks, block size, heads *
// size], [blocks, heads, block size, size] or, in columns, [blocks, heads, size / 16, block size, 16].
Tensor from_blocks(const Tensor& cache, const Tensor& blocks, int64_t heads, int64_t block_size, int64_t length) {
  Tensor paged = cache;  // [blocks, block size, heads, size]
  if (cache.dim() == 5) paged = cache.permute({0, 3, 1, 2, 4}).flatten(3);
  else if (cache.dim() == 4) paged = cache.transpose(1, 2);
  else paged = cache.unflatten(-1, {heads, -1});
  TORCH_CHECK(paged.size(1) == block_size, "block_size is ", block_size, ", and blocks of the cache hold ",
              paged.size(1), " tokens");
  // Only the tokens of the sequence are read: blocks of a cache are much longer than a tiny model's answers.
  const auto numbers = blocks.flatten().to(at::kLong);
  Tensors parts;
  for (int64_t start = 0; start < length; start += block_size) {
    const auto block = paged.select(0, numbers[start / block_size].item<int64_t>());
    parts.push_back(block.narrow(0, 0, std::min(block_size, length - start)));
  }
  return (parts.size() == 1 ? parts[0] : at::cat(parts)).transpose(0, 1);
}

// True where a key is hidden from a query of sequence `number`: undefined, or [queries, keys].
Tensor hidden_keys(const Inference& call, int64_t number, int64_t queries, int64_t keys) {
  enum { kMask = 0, kWholeMask = 1, kLeftUpCausal = 2, kRightDownCausal = 3 };
  const auto column = at::arange(keys), row = at::arange(queries).unsqueeze(1);
  if (call.sparse_mode == kLeftUpCausal) return column.gt(row);
  if (call.sparse_mode == kRightDownCausal) return column.gt(row + (keys - queries));
  TORCH_CHECK(call.sparse_mode == kMask || call.sparse_mode == kWholeMask, "sparse_mode ", call.sparse_mode,
              " is not emulated");
  if (!call.mask.defined() || !call.mask.numel()) return {};
  auto mask = call.mask;
  if (mask.dim() == 4) {
    TORCH_CHECK(mask.size(1) == 1, "an atten_mask for each head is not emulated");
    mask = mask.squeeze(1);
  }
  if (mask.dim() == 3) mask = mask[mask.size(0) == 1 ? 0 : number];
  else if (call.is_decode && mask.size(0) > 1) mask = mask.narrow(0, number, 1);  // [sequences, keys]
  return mask.narrow(0, 0, queries).narrow(1, 0, keys).to(at::kBool);
}

// Calls `one(number, queries, query_length, key_length)` for each sequence; `queries` narrows a tensor in the layout
// of the query, of `layout`, to it as [1, heads, length, size].
template <class One>
void each_sequence(const Inference& call, One one) {
  if (call.layout == "TND") {
    int64_t start = 0, key_end = 0;
    for (size_t index = 0; index < call.query_lengths.size(); ++index) {
      const auto length = call.query_lengths[index] - start;  // running totals
      auto keys = call.key_lengths.at(index);
      if (!call.blocks.defined()) {
        keys -= key_end;
        key_end += keys;
      }
      one(static_cast<int64_t>(index), start, length, keys);
      start += length;
    }
    return;
  }
  const auto query = served_heads_first(call.query, call.layout, call.heads);
  const auto given = [](const Ints& lengths, int64_t index, int64_t otherwise) {
    return lengths.empty() ? otherwise : lengths.size() == 1 ? lengths[0] : lengths.at(index);
  };
  for (int64_t index = 0; index < query.size(0); ++index) {
    int64_t whole = 0;
    if (!call.blocks.defined()) {
      const auto& first = call.keys.size() == 1 ? call.keys[0] : call.keys.at(index);
      whole = served_heads_first(first, call.layout, call.key_heads).size(2);
    }
    // One token needs no length: a given one is ignored.
    const auto length = query.size(2) == 1 ? 1 : given(call.query_lengths, index, query.size(2));
    one(index, int64_t{0}, length, given(call.key_lengths, index, whole));
  }
}

// Writes to `out`, in `out_layout`, and to `sums` unless it is undefined: [batch, heads, queries, 1], or [tokens, heads,
// 1] with TND. Queries without keys, and rows past the end of a sequence, give zeros, whose sums are infinite: operators
// that merge parts of attention (aclnnAttentionUpdate) give such a part no weight.
void infer(const Inference& call, const std::string& out_layout, const Tensor& out, const Tensor& sums) {
  const bool is_packed = call.layout == "TND";
  int64_t key_start = 0;
  const auto of_sequence = [&](const Tensor& tensor, const std::string& layout, int64_t heads, int64_t number,
                               int64_t start, int64_t length) {
    if (is_packed) return tensor.narrow(0, start, length).transpose(0, 1).unsqueeze(0);
    const auto batch = served_heads_first(tensor, layout, heads);
    return batch[batch.size(0) == 1 ? 0 : number].unsqueeze(0).narrow(2, 0, length);
  };
  out.zero_();
  if (sums.defined()) sums.fill_(std::numeric_limits<float>::infinity());
  each_sequence(call, [&](int64_t number, int64_t start, int64_t length, int64_t key_length) {
    const auto of_query = [&](const Tensor& tensor) {
      return of_sequence(tensor, call.layout, call.heads, number, start, length);
    };
    const auto of_key = [&](const Tensors& all) {
      const auto& tensor = all.size() == 1 ? all[0] : all.at(number);
      if (call.blocks.defined())
        return from_blocks(tensor, call.blocks[number], call.key_heads, call.block_size, key_length).unsqueeze(0);
      return of_sequence(tensor, call.layout, call.key_heads, number, key_start, key_length);
    };
    if (length && key_length) {
      auto query = of_query(call.query), key = of_key(call.keys);
      if (call.query_rope.defined() && call.query_rope.numel()) {
        query = at::cat({query, of_query(call.query_rope)}, -1);
        key = at::cat({key, of_key({call.key_rope})}, -1);
      }
      const auto most = at::empty(query.sizes().slice(0, 3), at::kFloat), total = at::empty_like(most);
      const auto to = is_packed ? of_query(out) : of_sequence(out, out_layout, call.heads, number, start, length);
      attend(query, key, of_key(call.values), call.scale, hidden_keys(call, number, length, key_length), most, total,
             to);
      // [1, heads, queries, 1], where a query that sees no key is as one of a sequence without keys
      const auto logs = (most + total.log()).masked_fill(total.eq(0), -kNothing), sum = logs.unsqueeze(-1);
      if (sums.defined() && is_packed) sums.narrow(0, start, length).copy_(sum[0].transpose(0, 1));
      else if (sums.defined()) sums.narrow(0, number, 1).narrow(2, 0, length).copy_(sum);
    }
    if (is_packed) key_start += key_length;
  });
}

// With rotary parts beside, kernels take the widths of DeepSeek's attention alone: 512 or, in prefill, 128, and 64.
void demand_agreement(const Inference& call) {
  constexpr int64_t kLatent = 512, kHead = 128, kRope = 64, kMultiple = 16, kLongest = 512;
  for (const auto& key : call.keys) demand_type_of(call.query, "query", key, "key");
  for (const auto& value : call.values) demand_type_of(call.query, "query", value, "value");
  demand_mask(call.sparse_mode, call.mask);
  if (call.is_decode && call.mask.defined() && call.mask.dim() == 2) {
    const auto rows = call.mask.size(0), sequences = served_heads_first(call.query, call.layout, call.heads).size(0);
    demand_value(rows == 1 || rows == sequences, "Rows of Tensor attenMask",
                 "the " + std::to_string(sequences) + " sequences if each has one query, with any sparseMode "
                 "(aclnnFusedInferAttentionScoreV4.md)", rows);
  }
  const auto is_given = [](const Tensor& tensor) { return tensor.defined() && tensor.numel(); };
  demand_that(is_given(call.query_rope) == is_given(call.key_rope), "Tensor queryRope",
              "needs keyRope, and keyRope it");
  if (is_given(call.query_rope) && is_given(call.key_rope)) {
    demand_type_of(call.query, "query", call.query_rope, "queryRope");
    demand_type_of(call.query, "query", call.key_rope, "keyRope");
    demand_that(call.query_rope.size(-1) == kRope, "Tensor queryRope", "must have 64 elements in its last dimension");
    const auto size = call.query.size(-1);
    demand_that(size == kLatent || size == kHead, "Tensor query",
                "must have 512 or 128 elements in its last dimension");
  }
  if (!call.blocks.defined()) return;
  demand_that(!call.key_lengths.empty(), "Tensor blockTable", "needs the lengths of the keys");
  demand_that(call.block_size % kMultiple == 0 && call.block_size <= kLongest, "blockSize",
              "must be a multiple of 16 up to 512");
}

// Kernels for one query in each sequence: they take neither TND nor rotary parts beside, nor values of another size.
bool is_decode(const Inference& call) {
  return call.is_decode && call.layout != "TND" && !(call.query_rope.defined() && call.query_rope.numel()) &&
         call.keys.at(0).size(-1) == call.values.at(0).size(-1) &&
         served_heads_first(call.query, call.layout, call.heads).size(2) == 1;
}

struct Quantised {
  Tensors all;
  Tensor query_padding, key_padding, key_prefix, value_prefix;
};

void fused_infer_attention(Inference call, const Tensor& position_encoding, const Quantised& extras, int64_t before,
                           int64_t after, bool wants_sums, const Tensor& out, const Tensor& sums) {
  constexpr int64_t kEverything = 2147483647;
  refuse_given("pse_shift", position_encoding);
  for (const auto& tensor : extras.all) refuse_given("quantisation", tensor);
  refuse_given("query_padding_size", extras.query_padding);
  refuse_given("kv_padding_size", extras.key_padding);
  refuse_given("key_shared_prefix", extras.key_prefix);
  refuse_given("value_shared_prefix", extras.value_prefix);
  if (!call.key_heads) call.key_heads = call.heads;
  auto out_layout = call.layout;
  if (const auto cut = call.layout.find('_'); cut != std::string::npos) {
    out_layout = call.layout.substr(cut + 1);
    call.layout = call.layout.substr(0, cut);
  }
  TORCH_CHECK((call.layout == "TND") == (out_layout == "TND"), "input_layout TND_", out_layout, " is not emulated");
  call.is_decode = is_decode(call);
  if (call.is_decode) call.sparse_mode = 0;
  // Without a mask they are not looked at, says the operator's document, nor in the other modes that are emulated.
  TORCH_CHECK(call.is_decode || call.sparse_mode != 0 || !call.mask.defined() ||
                  (before >= kEverything && after >= kEverything),
              "pre_tokens and next_tokens are not emulated");
  demand_agreement(call);
  if (sums.defined()) sums.zero_();  // what is not wanted is one zero
  infer(call, out_layout, out, wants_sums ? sums : Tensor());
}

}  // namespace

OP(FusedInferAttentionScoreV3,
   [](Tensor query, Tensors keys, Tensors values, Tensor pse, Tensor mask, Ints query_lengths, Ints key_lengths,
      Tensor dequant1, Tensor quant1, Tensor dequant2, Tensor quant2, Tensor quant_offset, Tensor antiquant,
      Tensor antiquant_offset, Tensor blocks, Tensor query_padding, Tensor key_padding, Tensor key_antiquant,
      Tensor key_antiquant_offset, Tensor value_antiquant, Tensor value_antiquant_offset, Tensor key_prefix,
      Tensor value_prefix, Ints, Tensor query_rope, Tensor key_rope, Tensor rope_antiquant, int64_t heads, double scale,
      int64_t before, int64_t after, std::string layout, int64_t key_heads, int64_t sparse_mode, int64_t,
      int64_t block_size, int64_t, bool wants_sums, int64_t, int64_t, Tensor out, Tensor sums) {
     fused_infer_attention({query, query_rope, key_rope, mask, blocks, keys, values, query_lengths, key_lengths, heads,
                            key_heads, sparse_mode, block_size, scale, layout},
                           pse,
                           {{dequant1, quant1, dequant2, quant2, quant_offset, antiquant, antiquant_offset,
                             key_antiquant, key_antiquant_offset, value_antiquant, value_antiquant_offset,
                             rope_antiquant},
                            query_padding, key_padding, key_prefix, value_prefix},
                           before, after, wants_sums, out, sums);
   })

// The workspace for captured graphs, whose tasks are replaced by others of more tokens; operators here need none.
CANN_JUMP(aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize, first_aclnnFusedInferAttentionScoreV3)

#if NPU_EMULATOR_CANN_9
OP(FusedInferAttentionScoreV4,
   [](Tensor query, Tensors keys, Tensors values, Tensor pse, Tensor mask, Ints query_lengths, Ints key_lengths,
      Tensor dequant1, Tensor quant1, Tensor dequant2, Tensor quant_out, Tensor quant_offset, Tensor antiquant,
      Tensor antiquant_offset, Tensor blocks, Tensor query_padding, Tensor key_padding, Tensor key_scale,
      Tensor key_offset, Tensor value_scale, Tensor value_offset, Tensor key_prefix, Tensor value_prefix, Tensor,
      Tensor query_rope, Tensor key_rope, Tensor rope_scale, Tensor query_scale, Tensor sink, int64_t heads,
      double scale, int64_t before, int64_t after, std::string layout, int64_t key_heads, int64_t sparse_mode, int64_t,
      int64_t block_size, int64_t, bool wants_sums, int64_t, int64_t, int64_t, Tensor out, Tensor sums) {
     refuse_given("learnable_sink", sink);
     fused_infer_attention({query, query_rope, key_rope, mask, blocks, keys, values, query_lengths, key_lengths, heads,
                            key_heads, sparse_mode, block_size, scale, layout},
                           pse,
                           {{dequant1, quant1, dequant2, quant_out, quant_offset, antiquant, antiquant_offset,
                             key_scale, key_offset, value_scale, value_offset, rope_scale, query_scale},
                            query_padding, key_padding, key_prefix, value_prefix},
                           before, after, wants_sums, out, sums);
   })
CANN_JUMP(aclnnFusedInferAttentionScoreV4GetMaxWorkspaceSize, first_aclnnFusedInferAttentionScoreV4)
#endif

OP(IncreFlashAttentionV4,
   [](Tensor query, Tensors keys, Tensors values, Tensor pse, Tensor mask, Ints key_lengths, Tensor dequant1,
      Tensor quant1, Tensor dequant2, Tensor quant2, Tensor quant_offset, Tensor antiquant, Tensor antiquant_offset,
      Tensor blocks, Tensor key_padding, int64_t heads, double scale, std::string layout, int64_t key_heads,
      int64_t block_size, int64_t, Tensor out) {
     constexpr int64_t kEverything = 2147483647;
     TORCH_CHECK(served_heads_first(query, layout, heads).size(2) == 1, "a sequence must have one query");
     fused_infer_attention(
         {query, {}, {}, mask, blocks, keys, values, {}, key_lengths, heads, key_heads, 0, block_size, scale, layout},
         pse, {{dequant1, quant1, dequant2, quant2, quant_offset, antiquant, antiquant_offset}, {}, key_padding, {}, {}},
         kEverything, kEverything, false, out, {});
   })

// Windows are not looked at: with a mask they have to agree with it.
OP(PromptFlashAttentionV3,
   [](Tensor query, Tensor key, Tensor value, Tensor pse, Tensor mask, Ints query_lengths, Ints key_lengths,
      Tensor dequant1, Tensor quant1, Tensor dequant2, Tensor quant2, Tensor quant_offset, int64_t heads, double scale,
      int64_t, int64_t, std::string layout, int64_t key_heads, int64_t sparse_mode, int64_t, Tensor out) {
     constexpr int64_t kEverything = 2147483647;
     fused_infer_attention({query, {}, {}, mask, {}, {key}, {value}, query_lengths, key_lengths, heads, key_heads,
                            sparse_mode, 0, scale, layout, false},
                           pse, {{dequant1, quant1, dequant2, quant2, quant_offset}, {}, {}, {}, {}}, kEverything,
                           kEverything, false, out, {});
   })

// ---- the cache of latent attention
namespace {

// The slot of each token, for an index with the beginning of each block of a sequence: only the number of the block
// counts, and its first token goes to the beginning of the block. Example: blocks of 4, [8, 16] and 6 tokens give
// 8 9 10 11 16 17.
Tensor slots_from_blocks(const Tensor& index, int64_t tokens, int64_t block_size) {
  const auto starts = index.reshape({-1, blocks_for(tokens, block_size)}).to(at::kLong);
  const auto offsets = at::arange(tokens, at::kLong);
  const auto begins = starts.index_select(1, offsets.div(block_size, "floor"));
  const auto slots = begins.div(block_size, "floor") * block_size + offsets.remainder(block_size);
  return at::where(begins.lt(0), at::full_like(slots, -1), slots).flatten();
}

// Writes `states` [batch, heads, tokens, size] into the cache. Tokens whose place is negative are not stored.
void update_cache(const Tensor& cache, const Tensor& states, const Tensor& index, const std::string& mode) {
  const auto batch = states.size(0), heads = states.size(1), tokens = states.size(2), size = states.size(3);
  const auto packed = states.transpose(1, 2).reshape({batch * tokens, heads, size}).to(cache.scalar_type());
  if (mode == "Norm") {  // [batch, heads, length, size]
    const auto positions = index.flatten().to(at::kLong);
    const auto kept = positions.ge(0).nonzero().squeeze(1);
    const auto rows = at::arange(batch, at::kLong).repeat_interleave(tokens).index_select(0, kept);
    const auto to = positions.index_select(0, kept);
    for (int64_t head = 0; head < heads; ++head)
      cache.select(1, head).index_put_({rows, to}, packed.select(1, head).index_select(0, kept));
    return;
  }
  const auto block_size = cache.size(1);
  const auto slots = mode.find("_BLK_") != std::string::npos ? slots_from_blocks(index, tokens, block_size)
                                                             : index.flatten().to(at::kLong);
  const auto kept = slots.ge(0).nonzero().squeeze(1), to = slots.index_select(0, kept);
  const auto rows = packed.index_select(0, kept), block = to.div(block_size, "floor"), at_token = to.remainder(block_size);
  if (mode.size() >= 2 && mode.substr(mode.size() - 2) == "NZ") {
    // A block holds, for each head, columns of 16 elements, each with all tokens.
    const auto columns = cache.view({cache.size(0), heads, size / kColumn, block_size, kColumn}).permute({0, 3, 1, 2, 4});
    columns.index_put_({block, at_token}, rows.unflatten(-1, {size / kColumn, kColumn}));
  } else {
    cache.index_put_({block, at_token}, rows);
  }
}

// The kernel takes the widths of DeepSeek's attention alone, and in the modes of blocks sees an index's block only.
void demand_widths(const Tensor& kv, const Tensor& weight, const Tensor& cache, const Tensor& index,
                   const std::string& mode) {
  constexpr int64_t kLatent = 512, kWhole = 576;
  demand_that(kv.size(-1) == kWhole, "Tensor kv", "must have 576 elements in its last dimension");
  demand_that(weight.numel() == kLatent, "Tensor gamma", "must have 512 elements");
  if (is_strict() && mode.find("_BLK_") != std::string::npos)
    demand_that(!index.clamp_min(0).remainder(cache.size(1)).any().item<bool>(), "Tensor index",
                "must name beginnings of blocks with this cacheMode");
}

}  // namespace

OP(KvRmsNormRopeCache, [](Tensor kv, Tensor weight, Tensor cos, Tensor sin, Tensor index, Tensor key_cache,
                          Tensor latent_cache, Tensor key_scale, Tensor latent_scale, Tensor key_offset,
                          Tensor latent_offset, double epsilon, std::string mode, bool wants_parts, Tensor of_key,
                          Tensor of_latent) {
  for (const auto& tensor : {key_scale, latent_scale, key_offset, latent_offset}) refuse_given("quantisation", tensor);
  static const std::vector<std::string> kModes = {"Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"};
  TORCH_CHECK(std::find(kModes.begin(), kModes.end(), mode) != kModes.end(), "no such cache_mode ", mode);
  demand_widths(kv, weight, key_cache, index, mode);
  for (const auto& [tensor, name] : {std::pair(key_cache, "kCacheRef"), {latent_cache, "ckvCacheRef"}})
    demand_type_of(kv, "kv", tensor, name);
  const auto size = weight.size(0);
  const auto x = wide(kv.narrow(-1, 0, size));
  const auto latent = (x * at::rsqrt(x.square().mean(-1, true) + epsilon) * wide(weight)).to(kv.scalar_type());
  const auto pairs = wide(kv.narrow(-1, size, kv.size(-1) - size)).unflatten(-1, {-1, 2});
  const auto first = pairs.select(-1, 0), second = pairs.select(-1, 1);
  const auto halves = at::cat({first, second}, -1), turned = at::cat({-second, first}, -1);
  const auto key = (halves * wide(cos) + turned * wide(sin)).to(kv.scalar_type());
  update_cache(key_cache, key, index, mode);
  update_cache(latent_cache, latent, index, mode);
  put(of_key, wants_parts ? key : at::full_like(key, std::numeric_limits<float>::quiet_NaN()));
  put(of_latent, wants_parts ? latent : at::full_like(latent, std::numeric_limits<float>::quiet_NaN()));
})

namespace {

// The table's rows of a position for each of time, height and width, [axes, tokens, 2, half], as one row for each token.
// Time has what the other two leave.
Tensor rows_of_axes(const Tensor& axes, const Ints& sections, bool interleaved) {
  TORCH_CHECK(static_cast<int64_t>(sections.size()) == axes.size(0), "mropeSection has ", sections.size(),
              " numbers for ", axes.size(0), " rows of positions");
  if (interleaved) {  // every third place is height's, and every third width's
    auto rows = axes.select(0, 0).clone();
    for (int64_t axis = 1; axis < axes.size(0); ++axis)
      rows.slice(-1, axis, sections[axis] * 3, 3).copy_(axes.select(0, axis).slice(-1, axis, sections[axis] * 3, 3));
    return rows;
  }
  Tensors parts;
  int64_t start = 0;
  for (size_t axis = 0; axis < sections.size(); start += sections[axis++])
    parts.push_back(axes.select(0, static_cast<int64_t>(axis)).narrow(-1, start, sections[axis]));
  return at::cat(parts, -1);
}

// A row [tokens, heads * size] turned by rows of a table of cosines, then sines.
void turn_by_table(const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& table,
                   const Ints& sections, int64_t head_size, bool is_neox, bool interleaved, const Tensor& query_out,
                   const Tensor& key_out) {
  auto rows = wide(table.index_select(0, positions.flatten().to(at::kLong)));
  if (positions.dim() == 2) {
    const auto axes = rows.view({positions.size(0), -1, 2, rows.size(-1) / 2});
    rows = rows_of_axes(axes, sections, interleaved).flatten(1);
  }
  const auto [cosines, sines] = halves_of(rows.unsqueeze(1), -1);
  const auto turn = [&](const Tensor& states, const Tensor& out) {
    const auto heads = wide(states).reshape({rows.size(0), -1, head_size});
    const auto part = heads.narrow(-1, 0, rows.size(-1)), rest = heads.slice(-1, rows.size(-1));
    Tensor first, second;
    if (is_neox) {
      std::tie(first, second) = halves_of(part, -1);
    } else {
      first = part.slice(-1, 0, std::nullopt, 2), second = part.slice(-1, 1, std::nullopt, 2);
    }
    const auto x = first * cosines - second * sines, y = second * cosines + first * sines;
    const auto turned = is_neox ? at::cat({x, y}, -1) : at::stack({x, y}, -1).flatten(-2);
    put(out, at::cat({turned, rest}, -1).view(out.sizes()));
  };
  turn(query, query_out);
  turn(key, key_out);
}

}  // namespace

OP(RopeWithSinCosCache, [](Tensor positions, Tensor query, Tensor key, Tensor table, Ints sections, int64_t head_size,
                           bool is_neox, Tensor query_out, Tensor key_out) {
  turn_by_table(positions, query, key, table, sections, head_size, is_neox, false, query_out, key_out);
})
#if NPU_EMULATOR_CANN_9
OP(RopeWithSinCosCacheV2, [](Tensor positions, Tensor query, Tensor key, Tensor table, Ints sections, int64_t head_size,
                             bool is_neox, int64_t cache_mode, Tensor query_out, Tensor key_out) {
  demand_that(cache_mode == 0 || cache_mode == 1, "cacheMode", "must be 0 or 1");
  turn_by_table(positions, query, key, table, sections, head_size, is_neox, cache_mode == 1, query_out, key_out);
})
#endif

// All but the k largest, and then all but the smallest set whose probabilities sum up to p, at minus infinity.
OP(ApplyTopKTopP, [](Tensor logits, Tensor p, Tensor k, Tensor out) {
  auto [ascending, order] = at::sort(wide(logits), std::optional<bool>(true), -1, false);
  if (k.defined()) {
    const auto first = (logits.size(-1) - k.to(at::kLong)).clamp_min(0).unsqueeze(-1);
    ascending = ascending.masked_fill(ascending.lt(ascending.gather(-1, first)), kNothing);
  }
  if (p.defined()) {
    auto outside = ascending.softmax(-1).cumsum(-1).le(1 - wide(p).unsqueeze(-1));
    outside.select(-1, -1).fill_(false);
    ascending = ascending.masked_fill(outside, kNothing);
  }
  put(out, at::empty_like(ascending).scatter(-1, order, ascending));
})

// Row b of `updates` goes to self[b], from position indices[b] of the axis on.
OP(InplaceScatterUpdate, [](Tensor self, Tensor indices, Tensor updates, int64_t axis) {
  const auto dim = axis < 0 ? axis + self.dim() : axis;
  const auto starts = whole_numbers(indices.flatten());
  for (size_t row = 0; row < starts.size(); ++row) {
    const auto number = static_cast<int64_t>(row);
    self[number].narrow(dim - 1, starts[row], updates.size(dim)).copy_(updates[number]);
  }
})
OP(ScatterNdUpdate, [](Tensor self, Tensor indices, Tensor updates) {
  const auto places = indices.to(at::kLong).flatten(0, -2).unbind(-1);
  c10::List<std::optional<Tensor>> list;
  for (const auto& place : places) list.push_back(place);
  auto shape = self.sizes().slice(places.size()).vec();
  shape.insert(shape.begin(), places.at(0).size(0));
  self.index_put_(list, updates.reshape(shape));
})
