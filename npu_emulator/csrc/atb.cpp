// ATB: operations as C++ classes, which libop_plugin_atb.so links, keeps and destroys, and functions in the manner of
// aclnn. Attention is computed sequence by sequence in float32.
#include <algorithm>
#include <limits>
#include <memory>

#include "atb_interface.h"
#include "grouped.h"

using namespace cann;

namespace {

constexpr int kAtbFailed = 3;  // ERROR_INTERNAL_ERROR

Tensor tensor_of(const atb::Tensor& tensor) {
  void* data = tensor.deviceData ? tensor.deviceData : tensor.hostData;
  if (!data && !tensor.desc.shape.dimNum) return {};
  const at::IntArrayRef shape(tensor.desc.shape.dims, tensor.desc.shape.dimNum);
  const auto options = at::TensorOptions().dtype(scalar_type(tensor.desc.dtype));
  if (!data) return at::empty(shape, options);  // no elements
  const auto seen = at::from_blob(data, shape, options);
  return may_run_later() && !tensor.deviceData ? seen.clone() : seen;
}

// Scores of one sequence: query [n, heads, d] and key [m, kv heads, d] give [heads, n, m], -inf where `masked`.
Tensor scores_of_sequence(const Tensor& query, const Tensor& key, double scale, const Tensor& masked) {
  const auto shared = quotient(query.size(1), key.size(1));
  const auto keys = wide(key).transpose(0, 1).repeat_interleave(shared, 0);
  const auto scores = at::matmul(wide(query).transpose(0, 1), keys.transpose(1, 2)) * scale;
  return masked.defined() ? scores.masked_fill(masked, -std::numeric_limits<float>::infinity()) : scores;
}
// Weights [heads, n, m] and values [m, kv heads, d] give [n, heads, d].
Tensor weighted(const Tensor& weights, const Tensor& value) {
  const auto shared = quotient(weights.size(0), value.size(1));
  return at::matmul(weights, wide(value).transpose(0, 1).repeat_interleave(shared, 0)).transpose(0, 1);
}
Tensor attend_sequence(const Tensor& query, const Tensor& key, const Tensor& value, double scale, const Tensor& masked) {
  return weighted(at::softmax(scores_of_sequence(query, key, scale, masked), -1), value);
}
// The mask of keys that the last `queries` of `keys` tokens must not see.
Tensor future(int64_t queries, int64_t keys) {
  return at::ones({queries, keys}, at::kBool).triu(keys - queries + 1);
}
// The first `tokens` tokens of a sequence whose cache lies in `blocks`: [tokens, heads, d].
Tensor of_blocks(const Tensor& cache, const Tensor& blocks, int64_t tokens) {
  const auto used = blocks_for(tokens, cache.size(1));
  return cache.index_select(0, blocks.narrow(0, 0, used).to(at::kLong)).flatten(0, 1).narrow(0, 0, tokens);
}

enum CachesOf { kBoth = 0, kKeyOnly = 1, kBothInTiles = 2 };
constexpr int64_t kTileBytes = 32;  // the width of a tile of NZ

// Whether an operation knows that tensors lie in NZ. Others must not read them as if they were in plain order.
template <class Parameters>
bool reads_tiles(const Parameters&) {
  return false;
}
bool reads_tiles(const atb::infer::ReshapeAndCacheParam& parameters) { return parameters.kvCacheCfg == kBothInTiles; }

void run(const atb::infer::ReshapeAndCacheParam& parameters, const Tensors& in, const Tensors&) {
  const size_t caches = parameters.kvCacheCfg == kKeyOnly ? 1 : 2;
  if (in.at(0).scalar_type() != at::kChar) demand_16_bits(in[0], "Tensor key");
  demand_int32(in.at(2 * caches), "Tensor slotMapping");
  const auto slots = in.at(2 * caches).to(at::kLong).flatten();
  const auto kept = slots.ge(0), to = slots.masked_select(kept);
  if (parameters.kvCacheCfg == kBothInTiles) {
    // A block [columns, tokens, width] holds one column of tiles of each token beneath the other.
    for (size_t index = 0; index < caches; ++index) {
      const auto& cache = in[caches + index];
      const auto width = cache.size(-1), tokens = cache.size(2);
      TORCH_CHECK(cache.dim() == 4 && width * cache.element_size() == kTileBytes, "a cache in NZ of the shape ",
                  cache.sizes(), " is not emulated");
      const auto rows = in[index].narrow(0, 0, slots.numel()).index({kept}).flatten(1).unflatten(-1, {-1, width});
      cache.permute({0, 2, 1, 3}).index_put_({to.div(tokens, "floor"), to.remainder(tokens)}, rows);
    }
    return;
  }
  for (size_t index = 0; index < caches; ++index)
    in[caches + index].flatten(0, 1).index_copy_(0, to, in[index].narrow(0, 0, slots.numel()).index({kept}));
}

void run(const atb::infer::RopeParam& parameters, const Tensors& in, const Tensors& out) {
  const auto cos = wide(in.at(2)).unsqueeze(1), sin = wide(in.at(3)).unsqueeze(1);
  for (size_t index : {0, 1}) {
    const auto x = wide(in[index].reshape({in[index].size(0), -1, in[2].size(-1)}));
    Tensor turned;
    if (parameters.rotaryCoeff == 2) {
      const auto [first, second] = halves_of(x, -1);
      turned = at::cat({-second, first}, -1);
    } else {
      const auto pairs = x.unflatten(-1, {-1, 2});
      turned = at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
    }
    put(out.at(index), (x * cos + turned * sin).reshape(out[index].sizes()));
  }
}

void run(const atb::infer::SelfAttentionParam& of, const Tensors& in, const Tensors& out) {
  using Parameters = atb::infer::SelfAttentionParam;
  const int64_t heads = of.headNum, kv_heads = of.kvHeadNum ? of.kvHeadNum : heads;
  demand_16_bits(in.at(0), "Tensor query");
  demand_int32(in.back(), "Tensor seqLen");
  const auto query = in.at(0).reshape({in[0].size(0), heads, -1});
  const auto result = out.at(0).view({out[0].size(0), heads, -1});
  int64_t start = 0;
  if (of.calcType == Parameters::kPrefixEncoder) {
    const auto queries = whole_numbers(in.at(5)), keys = whole_numbers(in.at(6));
    for (size_t index = 0; index < queries.size(); start += queries[index++]) {
      const auto key = of_blocks(in[1], in[3][index], keys[index]), value = of_blocks(in[2], in[3][index], keys[index]);
      result.narrow(0, start, queries[index])
          .copy_(attend_sequence(query.narrow(0, start, queries[index]), key, value, of.qkScale,
                        future(queries[index], keys[index])));
    }
    return;
  }
  const bool has_mask = of.maskType != Parameters::kNoMask;
  const auto key = in.at(1).reshape({in[1].size(0), kv_heads, -1});
  const auto value = in.at(2).reshape({in[2].size(0), kv_heads, -1});
  for (const auto tokens : whole_numbers(in.at(has_mask ? 4 : 3))) {
    Tensor masked;
    if (of.maskType == Parameters::kNormMask)
      masked = in[3].narrow(-2, 0, tokens).narrow(-1, 0, tokens).ne(0);
    else if (has_mask)
      masked = future(tokens, tokens);
    const auto part = [&](const Tensor& tensor) { return tensor.narrow(0, start, tokens); };
    part(result).copy_(attend_sequence(part(query), part(key), part(value), of.qkScale, masked));
    start += tokens;
  }
}

void run(const atb::infer::PagedAttentionParam& of, Tensors in, const Tensors& out) {
  using Parameters = atb::infer::PagedAttentionParam;
  if (of.mlaVHeadSize)  // latent attention: values are the first columns of the keys' cache
    in.insert(in.begin() + 2, in.at(1).slice(-1, 0, of.mlaVHeadSize));
  demand_16_bits(in.at(0), "Tensor query");
  demand_int32(in.at(3), "Tensor blockTables");
  demand_int32(in.at(4), "Tensor contextLens");
  const auto query = in.at(0).reshape({in[0].size(0), of.headNum, -1});
  const auto result = out.at(0).view({out[0].size(0), of.headNum, -1});
  const auto keys = whole_numbers(in.at(4));
  const bool is_chunked = of.maskType == Parameters::kSpecMask;
  // vllm-ascend hands over more lengths than there are queries, one each, before it captures a graph.
  const auto queries = is_chunked ? whole_numbers(in.at(6)) : Ints(std::min<size_t>(keys.size(), query.size(0)), 1);
  int64_t start = 0;
  for (size_t index = 0; index < queries.size(); start += queries[index++]) {
    if (!keys[index]) continue;
    Tensor masked;
    if (is_chunked) masked = in.at(5).narrow(0, start, queries[index]).narrow(1, 0, keys[index]).ne(0);
    const auto key = of_blocks(in[1], in[3][index], keys[index]), value = of_blocks(in[2], in[3][index], keys[index]);
    result.narrow(0, start, queries[index])
        .copy_(attend_sequence(query.narrow(0, start, queries[index]), key, value, of.qkScale, masked));
  }
}

// self [m, k] and weight [k, n], each turned where the parameters say so; a bias, or the total that is added to, follows.
void run(const atb::infer::LinearParam& parameters, const Tensors& in, const Tensors& out) {
  const auto self = operand(parameters.transposeA ? in.at(0).t() : in.at(0));
  auto result = at::matmul(self, operand(parameters.transposeB ? in.at(1).t() : in.at(1)));
  if (parameters.hasBias || parameters.enAccum) result = result + operand(in.at(2));
  put(out.at(0), result.view(out[0].sizes()));
}

// For each group of rows of self [rows, m] and weight [rows, n] adds their product, self turned, to a float32 total of
// groups * m * n elements. The list has running totals of rows.
void run(const atb::infer::GroupedMatmulInplaceAddParam& parameters, const Tensors& in, const Tensors& out) {
  TORCH_CHECK(parameters.transposeA && !parameters.transposeB, "transposeA must be true and transposeB false");
  add_products_of_groups(in.at(0), in.at(1), in.at(2), out.at(0));
}

// The name of an operation in the counts of calls: op-plugin has two functions for one class.
template <class Parameters>
const char* called(const Parameters&, const char* name) {
  return name;
}
const char* called(const atb::infer::PagedAttentionParam& parameters, const char* name) {
  return parameters.maskType == atb::infer::PagedAttentionParam::kSpecMask ? "PagedAttentionSplitfuse" : name;
}

struct EmulatedContext : atb::Context {
  void* stream = nullptr;
  atb::Status SetExecuteStream(aclrtStream given) override {
    stream = given;
    return 0;
  }
  aclrtStream GetExecuteStream() const override { return stream; }
  atb::Status SetAsyncTilingCopyStatus(bool) override { return 0; }
  bool GetAsyncTilingCopyStatus() const override { return false; }
};

// torch_npu does not look at what an operation returns. What its kernel notices is said when the device is waited for.
atb::Status failed_kernel(const char* name, const c10::Error& error) {
  const auto words = std::string(name) + ": " + error.what_without_backtrace();
  kernel_failed(words);
  return fail(kAtbFailed, words);
}

struct EmptyOperation : atb::Operation {
  const char* name = "";
  std::string GetName() const override { return name; }
  atb::Status InferShape(const atb::SVector<atb::TensorDesc>&, atb::SVector<atb::TensorDesc>&) const override {
    return 0;
  }
  uint32_t GetInputNum() const override { return 0; }
  uint32_t GetOutputNum() const override { return 0; }
  atb::Status Setup(const atb::VariantPack&, uint64_t& bytes, atb::Context*) override {
    bytes = 0;
    return 0;
  }
  atb::Status Execute(const atb::VariantPack&, uint8_t*, uint64_t, atb::Context*) override { return 0; }
};

template <class Parameters>
struct EmulatedOperation : EmptyOperation {
  Parameters parameters;
  EmulatedOperation(const Parameters& given, const char* its_name) : parameters(given) { name = its_name; }

  atb::Status Execute(const atb::VariantPack& pack, uint8_t*, uint64_t, atb::Context* context) override {
    try {
      const HostKernels guard;
      Tensors in, out;
      for (const auto& tensor : pack.inTensors)
        TORCH_CHECK(tensor.desc.format != ACL_FORMAT_FRACTAL_NZ || reads_tiles(parameters), "private format ",
                    int(tensor.desc.format), " is not emulated here");
      for (const auto& tensor : pack.inTensors) in.push_back(tensor_of(tensor));
      for (const auto& tensor : pack.outTensors) out.push_back(tensor_of(tensor));
      submit(context->GetExecuteStream(), called(parameters, name), [parameters = parameters, in, out] {
        const HostKernels guard;
        run(parameters, in, out);
      });
      return 0;
    } catch (const c10::Error& error) {
      return failed_kernel(name, error);
    }
  }
};

// A call in the manner of aclnn. Its operation may be asked to run more than once.
struct Call : EmptyOperation {
  std::function<void()> work;
};
struct AtbFunction {
  static constexpr bool is_checked = false;
};
void keep(AtbFunction, const char* name, std::function<void()> run, void** operation) {
  auto* call = *operation ? static_cast<Call*>(static_cast<atb::Operation*>(*operation)) : new Call();
  call->name = name;
  call->work = std::move(run);
  *operation = static_cast<atb::Operation*>(call);
}
int execute_call(void*, uint64_t, atb::Operation* operation, atb::Context* context) {
  auto& call = *static_cast<Call*>(operation);
  try {
    submit(context ? context->GetExecuteStream() : nullptr, call.name, call.work);
    return 0;
  } catch (const c10::Error& error) {
    return failed_kernel(call.name, error);
  }
}

}  // namespace

#define CANN_SHOWN __attribute__((visibility("default")))
namespace atb {
namespace {

// Parameters that change a result and are not honoured here: all but those that are 0.
void demand_unset(std::initializer_list<std::pair<const char*, int64_t>> parameters) {
  for (const auto& [name, value] : parameters) TORCH_CHECK(!value, name, " ", value, " is not emulated");
}
template <class Parameters>
void demand_emulated(const Parameters&) {}
void demand_emulated(const infer::ReshapeAndCacheParam& of) { demand_unset({{"compressType", of.compressType}}); }
void demand_emulated(const infer::SelfAttentionParam& of) {
  using Parameters = infer::SelfAttentionParam;
  demand_unset({{"quantType", of.quantType}, {"clampType", of.clampType}, {"kvcacheCfg", of.kvcacheCfg},
                {"scaleType", of.scaleType}, {"inputLayout", of.inputLayout}, {"cacheType", of.cacheType},
                {"mlaVHeadSize", of.mlaVHeadSize}, {"windowSize", of.windowSize},
                {"batchRunStatusEnable", of.batchRunStatusEnable}});
  TORCH_CHECK(of.qScale == 1, "qScale ", of.qScale, " is not emulated");
  const bool has_prefix = of.calcType == Parameters::kPrefixEncoder;
  TORCH_CHECK(has_prefix || of.calcType == Parameters::kPagedEncoder, "calcType ", int(of.calcType),
              " is not emulated");
  TORCH_CHECK(of.maskType == Parameters::kCompressedNormMask ||
                  (!has_prefix && (of.maskType == Parameters::kNoMask || of.maskType == Parameters::kNormMask)),
              "maskType ", int(of.maskType), " is not emulated");
}
void demand_emulated(const infer::PagedAttentionParam& of) {
  using Parameters = infer::PagedAttentionParam;
  demand_unset({{"quantType", of.quantType}, {"compressType", of.compressType}, {"scaleType", of.scaleType},
                {"inputLayout", of.inputLayout}, {"batchRunStatusEnable", of.batchRunStatusEnable},
                {"hasQuantOffset", of.hasQuantOffset}});
  TORCH_CHECK(of.maskType == Parameters::kNoMask || of.maskType == Parameters::kSpecMask, "maskType ",
              int(of.maskType), " is not emulated");
}

// op-plugin says only which operation could not be made; the warning says why.
Status refuse_operation(const std::string& reason, Operation** operation) {
  *operation = nullptr;
  TORCH_WARN(reason);
  return fail(kAtbFailed, reason);
}
template <class Parameters>
Status create(const Parameters& parameters, const char* name, Operation** operation) {
  try {
    demand_emulated(parameters);
  } catch (const c10::Error& error) {
    return refuse_operation(std::string(name) + ": " + error.what_without_backtrace(), operation);
  }
  *operation = new EmulatedOperation<Parameters>(parameters, name);
  return 0;
}

}  // namespace

#define EMULATED(NAME)                                                                           \
  template <>                                                                                    \
  CANN_SHOWN Status CreateOperation(const infer::NAME##Param& parameters, Operation** operation) { \
    return create(parameters, #NAME "Operation", operation);                                     \
  }
EMULATED(ReshapeAndCache)
EMULATED(Rope)
EMULATED(SelfAttention)
EMULATED(PagedAttention)
EMULATED(Linear)
EMULATED(GroupedMatmulInplaceAdd)

#define NOT_EMULATED(NAME)                                                            \
  template <>                                                                         \
  CANN_SHOWN Status CreateOperation(const infer::NAME##Param&, Operation** operation) { \
    return refuse_operation(#NAME "Operation is not emulated", operation);              \
  }
NOT_EMULATED(LinearParallel)
NOT_EMULATED(Elewise)
NOT_EMULATED(RmsNorm)
NOT_EMULATED(GroupTopk)

CANN_SHOWN Status DestroyOperation(Operation* operation) {
  delete operation;
  return 0;
}
CANN_SHOWN Status CreateContext(Context** context) {
  *context = new EmulatedContext();
  return 0;
}
CANN_SHOWN Status DestroyContext(Context* context) {
  delete context;
  return 0;
}
CANN_SHOWN uint64_t Utils::GetTensorSize(const Tensor& tensor) {
  uint64_t elements = tensor.desc.shape.dimNum ? 1 : 0;
  for (uint64_t dim = 0; dim < tensor.desc.shape.dimNum; ++dim) elements *= tensor.desc.shape.dims[dim];
  return elements * c10::elementSize(scalar_type(tensor.desc.dtype));
}

}  // namespace atb

// Two pointers more than an aclnn function has: the operation comes in, too, and the context follows.
#define ATB(NAME, ...) CANN_FUNCTION(AtbFunction, execute_call, NAME, __VA_ARGS__)

ATB(AtbMLA, [](Tensor query, Tensor query_rope, Tensor latent, Tensor key_rope, Tensor blocks, Tensor context, Tensor,
               Tensor query_lengths, Tensor, Tensor, int64_t, float scale, int64_t, int32_t, int32_t calc_type, int32_t,
               Tensor out, Tensor) {
  enum { kChunked = 1 };
  demand_16_bits(query, "Tensor qNope");
  demand_int32(blocks, "Tensor blockTables");
  const auto keys = whole_numbers(context);
  const auto queries =
      query_lengths.defined() && calc_type == kChunked ? whole_numbers(query_lengths) : Ints(keys.size(), 1);
  int64_t start = 0;
  for (size_t index = 0; index < keys.size(); start += queries[index++]) {
    if (!keys[index]) continue;
    const auto count = queries[index];
    const auto value = of_blocks(latent, blocks[index], keys[index]);
    const auto key = at::cat({value, of_blocks(key_rope, blocks[index], keys[index])}, -1);
    const auto whole_query = at::cat({query.narrow(0, start, count), query_rope.narrow(0, start, count)}, -1);
    out.narrow(0, start, count)
        .copy_(attend_sequence(whole_query, key, value, scale, count > 1 ? future(count, keys[index]) : Tensor()));
  }
})

// Attention over a part of the keys, merged with the result over other parts by their sums of exponentials.
ATB(AtbRingMLA, [](Tensor query, Tensor query_rope, Tensor key, Tensor key_rope, Tensor value, Tensor, Tensor lengths,
                   Tensor earlier, Tensor earlier_sums, int64_t, int64_t, float scale, int32_t, int32_t mask_type,
                   int32_t, int32_t calc_type, Tensor out, Tensor sums) {
  enum { kMerged = 0, kTriangular = 1 };
  demand_16_bits(query, "Tensor qNope");
  demand_int32(lengths, "Tensor seqLen");
  const bool are_different = lengths.dim() == 2;
  const auto queries = whole_numbers(are_different ? lengths[0] : lengths);
  const auto keys = are_different ? whole_numbers(lengths[1]) : queries;
  int64_t start = 0, key_start = 0;
  for (size_t index = 0; index < queries.size(); start += queries[index], key_start += keys[index], ++index) {
    const auto count = queries[index], key_count = keys[index];
    const auto of_query = [&](const Tensor& tensor) { return tensor.narrow(0, start, count); };
    const auto of_key = [&](const Tensor& tensor) { return tensor.narrow(0, key_start, key_count); };
    const auto shared_rope = of_key(key_rope).expand({key_count, key.size(1), key_rope.size(-1)});
    const auto scores = scores_of_sequence(at::cat({of_query(query), of_query(query_rope)}, -1),
                                  at::cat({of_key(key), shared_rope}, -1), scale,
                                  mask_type == kTriangular ? future(count, key_count) : Tensor());
    auto sum = at::logsumexp(scores, -1);                        // [heads, n]
    auto result = weighted(at::softmax(scores, -1), of_key(value));  // [n, heads, d]
    if (calc_type == kMerged) {
      const auto before = earlier_sums.narrow(1, start, count), both = at::logaddexp(before, sum);
      const auto share = [&](const Tensor& part) { return at::exp(part - both).t().unsqueeze(-1); };
      result = wide(of_query(earlier)) * share(before) + result * share(sum);
      sum = both;
    }
    of_query(out).copy_(result);
    sums.narrow(1, start, count).copy_(sum);
  }
})

ATB(AtbPagedCacheLoad, [](Tensor key_cache, Tensor value_cache, Tensor blocks, Tensor context, Tensor key, Tensor value,
                          Tensor starts, int8_t, bool is_cumulative, bool has_starts) {
  auto lengths = whole_numbers(context);
  if (is_cumulative)
    for (size_t index = lengths.size(); index-- > 1;) lengths[index] -= lengths[index - 1];
  const auto first = has_starts ? whole_numbers(starts) : Ints(lengths.size(), 0);
  int64_t at_token = 0;
  for (size_t index = 0; index < lengths.size(); at_token += lengths[index++]) {
    const auto load = [&](const Tensor& cache, const Tensor& to) {
      const auto tokens = of_blocks(cache, blocks[index], first[index] + lengths[index]);
      to.narrow(0, at_token, lengths[index]).copy_(tokens.narrow(0, first[index], lengths[index]));
    };
    load(key_cache, key);
    load(value_cache, value);
  }
})
