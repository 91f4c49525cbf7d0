// Attention for training (npu_fusion_attention) and its gradient, in float32. The gradient is computed from the
// statistics of the softmax that are given, since context parallelism gives merged ones.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "headers.h"

using namespace cann;

namespace {

// The parameters of a call, apart from the tensors.
struct Setting {
  double scale;
  int64_t before, after, heads;
  std::string layout;
  int64_t sparse_mode;
  double kept;       // the share of weights that dropout leaves
  Tensor kept_bits;  // and which: a bit for each of [batch, heads, queries, keys], one sequence after the other
};

enum SparseMode : int64_t { kMask = 0, kWholeMask = 1, kLeftUpCausal = 2, kRightDownCausal = 3, kBand = 4 };

void refuse_extras(const Tensor& position_encoding, const Tensor& padding_mask, const Ints& prefix) {
  TORCH_CHECK(!position_encoding.defined() || !position_encoding.numel(), "a position encoding (pse) is not emulated");
  TORCH_CHECK(!padding_mask.defined() || !padding_mask.numel(), "padding_mask is not emulated");
  TORCH_CHECK(prefix.empty(), "prefix is not emulated");
}

// The factors of dropout for weights of a shape, whose bits begin with `first`; undefined without dropout.
Tensor factors_of_dropout(const Setting& setting, int64_t first, at::IntArrayRef shape) {
  if (setting.kept == 1) return {};
  const auto count = c10::multiply_integers(shape);
  TORCH_CHECK(setting.kept_bits.defined() && setting.kept_bits.numel() * 8 >= first + count,
              "dropout with keep_prob ", setting.kept, " needs a bit for each of ", first + count, " weights");
  const auto bits = unpacked_bits(setting.kept_bits, first + count).narrow(0, first, count).view(shape);
  return setting.kept > 0 ? bits / setting.kept : bits.to(at::kFloat);
}

// True where a key is hidden from a query: undefined, or something that broadcasts to [batch, heads, queries, keys].
// No mode has an effect without a mask.
Tensor hidden_keys(const Setting& setting, const Tensor& mask, int64_t queries, int64_t keys) {
  const auto row = at::arange(queries).unsqueeze(1), column = at::arange(keys);
  const auto from_end = keys - queries;
  TORCH_CHECK(setting.sparse_mode >= kMask && setting.sparse_mode <= kBand, "sparse_mode ", setting.sparse_mode,
              " is not emulated");
  if (!mask.defined() || !mask.numel()) return {};
  switch (setting.sparse_mode) {
    case kLeftUpCausal: return column.gt(row);
    case kRightDownCausal: return column.gt(row + from_end);
    case kBand: return column.gt(row + from_end + setting.after).logical_or(column.lt(row + from_end - setting.before));
    default: return mask.to(at::kBool);
  }
}

// A view as [batch, heads, sequence, size]; writing to it writes to the tensor.
Tensor heads_first(const Tensor& tensor, const std::string& layout, int64_t heads) {
  if (layout == "BNSD") return tensor;
  if (layout == "BSND") return tensor.transpose(1, 2);
  if (layout == "BSH") return tensor.unflatten(-1, {heads, -1}).transpose(1, 2);
  if (layout == "SBH") return tensor.unflatten(-1, {heads, -1}).permute({1, 2, 0, 3});
  TORCH_CHECK(false, "input_layout ", layout, " is not emulated");
}
int64_t heads_of_keys(const Setting& setting, const Tensor& query, const Tensor& key) {
  if (setting.layout == "BNSD") return key.size(1);
  if (setting.layout == "BSND") return key.size(2);
  return quotient(setting.heads * key.size(-1), query.size(-1));
}

// [batch, heads, queries, keys]
Ints weights_of(const Tensor& query, const Tensor& key) {
  return {query.size(0), query.size(1), query.size(2), key.size(2)};
}

// Scores [batch, heads, queries, keys] in float32; `shared` queries' heads have one key's head.
Tensor scores_of(const Tensor& query, const Tensor& key, double scale, const Tensor& hidden) {
  const auto keys = wide(key).repeat_interleave(quotient(query.size(1), key.size(1)), 1);
  const auto scores = at::matmul(wide(query), keys.transpose(-1, -2)) * scale;
  return hidden.defined() ? scores.masked_fill(hidden, -std::numeric_limits<float>::infinity()) : scores;
}

constexpr int64_t kCompressed = 2048;  // the side of the mask of causal rules and bands

// Whether each [2048, 2048] of a compressed mask hides the keys behind the diagonal and no others. Tensors have no
// version below CANN's interface, and one mask serves a whole training: where the last one was right, one row in 64 is
// compared, so that a mask that changes in place, or another one at the same address, is noticed at next to no cost.
bool is_triangle(const Tensor& mask) {
  static const auto* triangle = new Tensor(at::ones({kCompressed, kCompressed}, at::kByte).triu(1));
  static std::atomic<const void*> last_right{nullptr};
  const auto bytes = (mask.element_size() == 1 ? mask.view(at::kByte) : mask.ne(0).view(at::kByte)).contiguous();
  const auto* given = bytes.const_data_ptr<uint8_t>();
  const auto* expected = triangle->const_data_ptr<uint8_t>();
  const int64_t rows = bytes.numel() / kCompressed, step = last_right == mask.const_data_ptr() ? 64 : 1;
  for (int64_t row = 0; row < rows; row += step)
    if (std::memcmp(given + row * kCompressed, expected + row % kCompressed * kCompressed, kCompressed)) return false;
  last_right = mask.const_data_ptr();
  return true;
}

}  // namespace

namespace cann {

void demand_mask(int64_t sparse_mode, const Tensor& mask) {
  const bool has_mask = mask.defined() && mask.numel();
  demand_that(has_mask || sparse_mode < kWholeMask || sparse_mode > kBand, "sparseMode", "1 to 4 needs attenMask");
  if (!has_mask || sparse_mode < kLeftUpCausal || sparse_mode > kBand || !is_strict()) return;
  demand_that(mask.size(-1) == kCompressed && mask.size(-2) == kCompressed, "Tensor attenMask",
              "must be [2048, 2048] with sparseMode 2, 3 and 4");
  demand_that(is_triangle(mask), "Tensor attenMask",
              "must be ones(2048, 2048).triu(1) with sparseMode 2, 3 and 4, where 1 hides a key "
              "(sparse_mode_introduction.md of ops-transformer)");
}

void attend(const Tensor& query, const Tensor& key, const Tensor& value, double scale, const Tensor& hidden,
            const Tensor& most, const Tensor& total, const Tensor& out, const Tensor& factors) {
  const auto scores = scores_of(query, key, scale, hidden);
  const auto largest = scores.amax(-1, true).clamp_min(std::numeric_limits<float>::lowest());
  const auto exponentials = at::exp(scores - largest), sum = exponentials.sum(-1, true);
  const auto values = wide(value).repeat_interleave(quotient(query.size(1), value.size(1)), 1);
  const auto weights = exponentials / sum.clamp_min(1e-30);
  out.copy_(at::matmul(factors.defined() ? weights * factors : weights, values));
  most.copy_(largest.squeeze(-1));
  total.copy_(sum.squeeze(-1));
}

}  // namespace cann

namespace {

struct Gradients {
  Tensor query, key, value;
};

// With P the weights, F the factors of dropout (or ones) and dO the gradient of the output O: dV = (P * F)^T dO, and of
// the scores P * (F * dO V^T - rowsum(dO * O)).
void differentiate(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& gradient,
                   const Tensor& output, const Tensor& most, const Tensor& total, double scale, const Tensor& hidden,
                   const Tensor& factors, const Gradients& out) {
  const auto key_heads = key.size(1), shared = quotient(query.size(1), key_heads);
  const auto weights =
      at::exp(scores_of(query, key, scale, hidden) - most.unsqueeze(-1)) / total.unsqueeze(-1).clamp_min(1e-30);
  const auto values = wide(value).repeat_interleave(shared, 1), keys = wide(key).repeat_interleave(shared, 1);
  const auto of_output = wide(gradient);
  const auto along = (of_output * wide(output)).sum(-1, true);
  const auto dropped = [&](const Tensor& weights) { return factors.defined() ? weights * factors : weights; };
  const auto of_scores = weights * (dropped(at::matmul(of_output, values.transpose(-1, -2))) - along) * scale;
  const auto joined = [&](const Tensor& part) { return part.unflatten(1, {key_heads, shared}).sum(2); };
  out.query.copy_(at::matmul(of_scores, keys));
  out.key.copy_(joined(at::matmul(of_scores.transpose(-1, -2), wide(query))));
  out.value.copy_(joined(at::matmul(dropped(weights).transpose(-1, -2), of_output)));
}

// The statistics of a packed batch's softmax, [tokens, heads, 8] by shape, lie sequence by sequence with heads first:
// [heads, queries, 8] each. It is the kernel's layout (NTD) unless softmaxOutLayout asks for another, see
// softmaxMaxOffset in flash_attention_score_s1s2_bn2gs1.h of CANN's ops-transformer. Returns a sequence's part as
// [1, heads, queries, 8]; writing to it writes to the tensor.
Tensor statistics_of_sequence(const Tensor& statistics, int64_t start, int64_t queries) {
  const auto heads = statistics.size(1), copies = statistics.size(2);
  return statistics.view({-1, copies}).narrow(0, start * heads, queries * heads).view({1, heads, queries, copies});
}

// Calls `one(queries, keys, statistics, first)` with the part of each sequence of a packed batch, and how many weights
// of one head are before it: ends are running totals of lengths. A sequence without queries or keys gives nothing:
// callers may pass totals with the leading 0 of cu_seqlens. Totals of 0 at the end are places without a sequence.
template <class One>
void each_sequence(const Ints& query_ends, const Ints& key_ends, One one) {
  int64_t query_start = 0, key_start = 0, first = 0;
  for (size_t index = 0; index < query_ends.size(); ++index) {
    if (query_start + key_start && !query_ends[index] && !key_ends.at(index)) break;
    const auto of_queries = [&](const Tensor& t) {
      return t.narrow(0, query_start, query_ends[index] - query_start).transpose(0, 1).unsqueeze(0);
    };
    const auto of_keys = [&](const Tensor& t) {
      return t.narrow(0, key_start, key_ends.at(index) - key_start).transpose(0, 1).unsqueeze(0);
    };
    const auto of_statistics = [&](const Tensor& t) {
      return statistics_of_sequence(t, query_start, query_ends[index] - query_start);
    };
    const bool is_empty = query_ends[index] == query_start || key_ends.at(index) == key_start;
    if (!is_empty) one(of_queries, of_keys, of_statistics, first);
    first += (query_ends[index] - query_start) * (key_ends.at(index) - key_start);
    query_start = query_ends[index];
    key_start = key_ends[index];
  }
}

}  // namespace

// The operators below come in two versions. The second adds where the position encoding starts, and its kind.
namespace {

void demand_agreement(const Setting& setting, const Tensor& query, const Tensor& key, const Tensor& value,
                      const Tensor& mask) {
  demand_type_of(query, "query", key, "key");
  demand_type_of(query, "query", value, "value");
  demand_mask(setting.sparse_mode, mask);
}

// Kernels skip what lies outside of the window without a look at the mask, which must hide it as well.
void demand_window(const Setting& setting, const Tensor& hidden, int64_t queries, int64_t keys) {
  if (!is_strict() || setting.sparse_mode != kMask || !hidden.defined()) return;
  if (setting.before >= queries - 1 && setting.after >= keys - 1) return;
  const auto before = std::clamp(setting.before, -keys, queries), after = std::clamp(setting.after, -queries, keys);
  const auto later = at::arange(keys) - at::arange(queries).unsqueeze(1);
  const auto outside = later.gt(after).logical_or(later.lt(-before));
  demand_that(!outside.logical_and(hidden.logical_not()).any().item<bool>(), "Tensor attenMask",
              ("must hide all keys outside of preTokens " + std::to_string(setting.before) + " and nextTokens " +
               std::to_string(setting.after) + " with sparseMode 0 (aclnnFlashAttentionScore.md)").c_str());
}

// Totals of lengths rise, except for zeros at the end.
int64_t last_total(const Ints& ends) { return ends.empty() ? 0 : *std::max_element(ends.begin(), ends.end()); }

// The demands of aclnnFlashAttentionVarLenScore.md on a packed batch.
void demand_packing(const Setting& setting, const Ints& query_ends, const Ints& key_ends, const Tensor& query,
                    const Tensor& key) {
  if (!is_strict()) return;
  for (const auto& [ends, tokens, name] :
       {std::tuple(&query_ends, query.size(0), "actualSeqQLen"), {&key_ends, key.size(0), "actualSeqKvLen"}})
    demand_value(last_total(*ends) == tokens, name,
                 "running totals that end with the " + std::to_string(tokens) + " tokens of the batch",
                 last_total(*ends));
  if (setting.sparse_mode != kRightDownCausal) return;
  each_sequence(query_ends, key_ends, [&](auto queries, auto keys, auto, int64_t) {
    const auto most = keys(key).size(2);
    demand_value(queries(query).size(2) <= most, "actualSeqQLen",
                 "at most the " + std::to_string(most) + " keys of each sequence with sparseMode 3",
                 queries(query).size(2));
  });
}

void score(const Setting& setting, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
           const Tensor& most, const Tensor& total, const Tensor& out) {
  demand_agreement(setting, query, key, value, mask);
  const auto key_heads = heads_of_keys(setting, query, key);
  const auto q = heads_first(query, setting.layout, setting.heads), k = heads_first(key, setting.layout, key_heads);
  const auto sum = at::empty(most.sizes().slice(0, 3), at::kFloat), largest = at::empty_like(sum);
  const auto hidden = hidden_keys(setting, mask, q.size(2), k.size(2));
  demand_window(setting, hidden, q.size(2), k.size(2));
  attend(q, k, heads_first(value, setting.layout, key_heads), setting.scale, hidden, largest, sum,
         heads_first(out, setting.layout, setting.heads), factors_of_dropout(setting, 0, weights_of(q, k)));
  most.copy_(largest.unsqueeze(-1).expand_as(most));
  total.copy_(sum.unsqueeze(-1).expand_as(total));
}

// The inputs of a gradient, and its outputs.
struct Backward {
  Tensor query, key, value, gradient, mask, most, total, output;
  Gradients out;
};

void demand_agreement(const Setting& setting, const Backward& given) {
  demand_agreement(setting, given.query, given.key, given.value, given.mask);
  demand_type_of(given.query, "query", given.gradient, "dy");
  demand_type_of(given.query, "query", given.output, "attentionIn");
}

void score_gradient(const Setting& setting, const Backward& given) {
  demand_agreement(setting, given);
  const auto key_heads = heads_of_keys(setting, given.query, given.key);
  const auto q = [&](const Tensor& t) { return heads_first(t, setting.layout, setting.heads); };
  const auto k = [&](const Tensor& t) { return heads_first(t, setting.layout, key_heads); };
  const auto queries = q(given.query).size(2), keys = k(given.key).size(2);
  const auto hidden = hidden_keys(setting, given.mask, queries, keys);
  demand_window(setting, hidden, queries, keys);
  differentiate(q(given.query), k(given.key), k(given.value), q(given.gradient), q(given.output),
                given.most.select(-1, 0), given.total.select(-1, 0), setting.scale, hidden,
                factors_of_dropout(setting, 0, weights_of(q(given.query), k(given.key))),
                {q(given.out.query), k(given.out.key), k(given.out.value)});
}

Tensor hidden_of_sequence(const Setting& setting, const Tensor& mask, int64_t queries, int64_t keys) {
  auto hidden = hidden_keys(setting, mask, queries, keys);
  if (hidden.defined()) hidden = hidden.narrow(-2, 0, queries).narrow(-1, 0, keys);
  demand_window(setting, hidden, queries, keys);
  return hidden;
}

void packed_score(const Setting& setting, const Ints& query_ends, const Ints& key_ends, const Tensor& query,
                  const Tensor& key, const Tensor& value, const Tensor& mask, const Tensor& most, const Tensor& total,
                  const Tensor& out) {
  demand_agreement(setting, query, key, value, mask);
  demand_packing(setting, query_ends, key_ends, query, key);
  for (const auto& result : {out, most, total}) result.zero_();  // for tokens of sequences without keys
  each_sequence(query_ends, key_ends, [&](auto queries, auto keys, auto statistics, int64_t first) {
    const auto q = queries(query), k = keys(key);
    const auto sum = at::empty(q.sizes().slice(0, 3), at::kFloat), largest = at::empty_like(sum);
    attend(q, k, keys(value), setting.scale, hidden_of_sequence(setting, mask, q.size(2), k.size(2)), largest, sum,
           queries(out), factors_of_dropout(setting, first * q.size(1), weights_of(q, k)));
    statistics(most).copy_(largest.unsqueeze(-1).expand_as(statistics(most)));
    statistics(total).copy_(sum.unsqueeze(-1).expand_as(statistics(total)));
  });
}

void packed_score_gradient(const Setting& setting, const Ints& query_ends, const Ints& key_ends,
                           const Backward& given) {
  demand_agreement(setting, given);
  demand_packing(setting, query_ends, key_ends, given.query, given.key);
  for (const auto& result : {given.out.query, given.out.key, given.out.value}) result.zero_();
  each_sequence(query_ends, key_ends, [&](auto queries, auto keys, auto statistics, int64_t first) {
    const auto q = queries(given.query), k = keys(given.key);
    differentiate(q, k, keys(given.value), queries(given.gradient), queries(given.output),
                  statistics(given.most).select(-1, 0), statistics(given.total).select(-1, 0), setting.scale,
                  hidden_of_sequence(setting, given.mask, q.size(2), k.size(2)),
                  factors_of_dropout(setting, first * q.size(1), weights_of(q, k)),
                  {queries(given.out.query), keys(given.out.key), keys(given.out.value)});
  });
}

}  // namespace

OP(FlashAttentionScore, [](Tensor query, Tensor key, Tensor value, Tensor pse, Tensor bits, Tensor padding,
                           Tensor mask, Ints prefix, double scale, double kept, int64_t before, int64_t after,
                           int64_t heads, std::string layout, int64_t, int64_t sparse_mode, Tensor most, Tensor total,
                           Tensor, Tensor out) {
  refuse_extras(pse, padding, prefix);
  score({scale, before, after, heads, layout, sparse_mode, kept, bits}, query, key, value, mask, most, total, out);
})
OP(FlashAttentionScoreV2, [](Tensor query, Tensor key, Tensor value, Tensor pse, Tensor bits, Tensor padding,
                             Tensor mask, Ints prefix, Ints, Ints, double scale, double kept, int64_t before,
                             int64_t after, int64_t heads, std::string layout, int64_t, int64_t sparse_mode, int64_t,
                             Tensor most, Tensor total, Tensor, Tensor out) {
  refuse_extras(pse, padding, prefix);
  score({scale, before, after, heads, layout, sparse_mode, kept, bits}, query, key, value, mask, most, total, out);
})

OP(FlashAttentionScoreGrad,
   [](Tensor query, Tensor key, Tensor value, Tensor gradient, Tensor pse, Tensor bits, Tensor padding, Tensor mask,
      Tensor most, Tensor total, Tensor, Tensor output, Ints prefix, double scale, double kept, int64_t before,
      int64_t after, int64_t heads, std::string layout, int64_t, int64_t sparse_mode, Tensor of_query, Tensor of_key,
      Tensor of_value, Tensor) {
     refuse_extras(pse, padding, prefix);
     score_gradient({scale, before, after, heads, layout, sparse_mode, kept, bits},
                    {query, key, value, gradient, mask, most, total, output, {of_query, of_key, of_value}});
   })
OP(FlashAttentionScoreGradV2,
   [](Tensor query, Tensor key, Tensor value, Tensor gradient, Tensor pse, Tensor bits, Tensor padding, Tensor mask,
      Tensor most, Tensor total, Tensor, Tensor output, Ints prefix, Ints, Ints, double scale, double kept,
      int64_t before, int64_t after, int64_t heads, std::string layout, int64_t, int64_t sparse_mode, int64_t,
      Tensor of_query, Tensor of_key, Tensor of_value, Tensor) {
     refuse_extras(pse, padding, prefix);
     score_gradient({scale, before, after, heads, layout, sparse_mode, kept, bits},
                    {query, key, value, gradient, mask, most, total, output, {of_query, of_key, of_value}});
   })

OP(FlashAttentionVarLenScore,
   [](Tensor query, Tensor key, Tensor value, Tensor pse, Tensor bits, Tensor padding, Tensor mask, Ints prefix,
      Ints query_ends, Ints key_ends, double scale, double kept, int64_t before, int64_t after, int64_t heads,
      std::string layout, int64_t, int64_t sparse_mode, Tensor most, Tensor total, Tensor, Tensor out) {
     refuse_extras(pse, padding, prefix);
     packed_score({scale, before, after, heads, layout, sparse_mode, kept, bits}, query_ends, key_ends, query, key,
                  value, mask, most, total, out);
   })
OP(FlashAttentionVarLenScoreV2,
   [](Tensor query, Tensor key, Tensor value, Tensor pse, Tensor bits, Tensor padding, Tensor mask, Ints prefix,
      Ints query_ends, Ints key_ends, Ints, Ints, double scale, double kept, int64_t before, int64_t after,
      int64_t heads, std::string layout, int64_t, int64_t sparse_mode, int64_t, Tensor most, Tensor total, Tensor,
      Tensor out) {
     refuse_extras(pse, padding, prefix);
     packed_score({scale, before, after, heads, layout, sparse_mode, kept, bits}, query_ends, key_ends, query, key,
                  value, mask, most, total, out);
   })

OP(FlashAttentionUnpaddingScoreGrad,
   [](Tensor query, Tensor key, Tensor value, Tensor gradient, Tensor pse, Tensor bits, Tensor padding, Tensor mask,
      Tensor most, Tensor total, Tensor, Tensor output, Ints prefix, Ints query_ends, Ints key_ends, double scale,
      double kept, int64_t before, int64_t after, int64_t heads, std::string layout, int64_t, int64_t sparse_mode,
      Tensor of_query, Tensor of_key, Tensor of_value, Tensor) {
     refuse_extras(pse, padding, prefix);
     packed_score_gradient({scale, before, after, heads, layout, sparse_mode, kept, bits}, query_ends, key_ends,
                           {query, key, value, gradient, mask, most, total, output, {of_query, of_key, of_value}});
   })
OP(FlashAttentionUnpaddingScoreGradV2,
   [](Tensor query, Tensor key, Tensor value, Tensor gradient, Tensor pse, Tensor bits, Tensor padding, Tensor mask,
      Tensor most, Tensor total, Tensor, Tensor output, Ints prefix, Ints query_ends, Ints key_ends, Ints, Ints,
      double scale, double kept, int64_t before, int64_t after, int64_t heads, std::string layout, int64_t,
      int64_t sparse_mode, int64_t, Tensor of_query, Tensor of_key, Tensor of_value, Tensor) {
     refuse_extras(pse, padding, prefix);
     packed_score_gradient({scale, before, after, heads, layout, sparse_mode, kept, bits}, query_ends, key_ends,
                           {query, key, value, gradient, mask, most, total, output, {of_query, of_key, of_value}});
   })

namespace {

// The statistics of one attention over part of the keys, and its result.
struct Part {
  Tensor result, most, sum;
};

// [tokens, heads, 1] of statistics [tokens, heads, 8]. Unless they lie as the result does ("TND"), they lie sequence by
// sequence with heads first, between `starts`, which rise from 0 to the number of tokens.
Tensor by_token(const Tensor& statistics, const Tensor& starts, const std::string& layout) {
  if (layout == "TND") return statistics.narrow(-1, 0, 1);
  demand_that(starts.defined() && starts.numel(), "Tensor actualSeqQlen", "is needed with the layout TND");
  const auto positions = whole_numbers(starts);
  Tensors found;
  for (size_t index = 1; index < positions.size(); ++index) {
    const auto first = positions[index - 1], tokens = positions[index] - first;
    found.push_back(statistics_of_sequence(statistics, first, tokens).squeeze(0).transpose(0, 1).narrow(-1, 0, 1));
  }
  return at::cat(found);
}

// Merges attention over two parts of the keys by their largest scores and sums of exponentials, whose last dimension
// holds copies: [batch, heads, positions, 8] for results of [positions, batch, heads * size] (SBH), or [tokens, heads, 8]
// for [tokens, heads, size] (TND).
void merge(const Part& earlier, const Part& other, const Tensor& starts, const std::string& layout,
           const std::string& statistics_layout, const Part& out) {
  const auto largest = at::maximum(earlier.most, other.most);
  const auto before = earlier.sum * (earlier.most - largest).exp(), now = other.sum * (other.most - largest).exp();
  const auto total = before + now;
  const auto shared = [&](const Tensor& result, const Tensor& part) {
    if (layout == "TND") return wide(result) * by_token(part / total, starts, statistics_layout);
    const auto share = (part / total).narrow(-1, 0, 1).permute({2, 0, 1, 3});
    return (wide(result).unflatten(-1, {share.size(2), -1}) * share).flatten(2);
  };
  put(out.result, shared(earlier.result, before) + shared(other.result, now));
  put(out.most, largest);
  put(out.sum, total);
}

}  // namespace

OP(RingAttentionUpdate, [](Tensor earlier, Tensor earlier_most, Tensor earlier_sum, Tensor other, Tensor other_most,
                           Tensor other_sum, Tensor starts, std::string layout, Tensor out, Tensor most, Tensor sum) {
  merge({earlier, earlier_most, earlier_sum}, {other, other_most, other_sum}, starts, layout, "", {out, most, sum});
})

#if NPU_EMULATOR_CANN_9
OP(RingAttentionUpdateV2,
   [](Tensor earlier, Tensor earlier_most, Tensor earlier_sum, Tensor other, Tensor other_most, Tensor other_sum,
      Tensor starts, std::string layout, std::string statistics_layout, Tensor out, Tensor most, Tensor sum) {
     merge({earlier, earlier_most, earlier_sum}, {other, other_most, other_sum}, starts, layout, statistics_layout,
           {out, most, sum});
   })

// Merges attention over parts of the keys by the logarithm of each part's sum of exponentials, [rows], for parts of
// [rows, size]. A part that had no keys has the sum +inf, which the kernel reads as none.
OP(AttentionUpdate, [](Tensors sums, Tensors parts, int64_t wants_sum, Tensor out, Tensor sum) {
  constexpr size_t kMostParts = 16;
  demand_as_many(sums.size(), parts.size());
  TORCH_CHECK(!sums.empty() && sums.size() <= kMostParts, "lse and local_out must have 1 to 16 tensors");
  demand_that(wants_sum == 0 || wants_sum == 1, "updateType", "must be 0 or 1");
  constexpr auto kInfinity = std::numeric_limits<float>::infinity();
  const auto each = at::stack(sums);
  const auto given = each.masked_fill(each.eq(kInfinity), -kInfinity);
  const auto total = at::logsumexp(given, 0);
  auto merged = at::zeros_like(wide(parts[0]));
  for (size_t index = 0; index < parts.size(); ++index)
    merged += wide(parts[index]) * at::exp(given[static_cast<int64_t>(index)] - total).unsqueeze(-1);
  put(out, merged);
  if (wants_sum) put(sum, total);
})
#endif
