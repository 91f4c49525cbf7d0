// Operators of vllm-ascend's own package for CANN (libcust_opapi.so, built from csrc/ of vllm-ascend 0.23), and what its
// models call of op-plugin of 2026 beside the operators of the pins. They compute in float32 and round once.
#include <algorithm>

#include "headers.h"
#include "operators.h"

#if NPU_EMULATOR_CANN_9

using namespace cann;

namespace {

// Which copies of tokens go to which row, in the order of experts: those of experts in [begin, end) alone.
struct Routing {
  Tensor experts;  // of all copies, the first choices of a token beside each other
  Tensor order;    // the copies that are kept, by expert, and else by token
  Tensor counts;   // of each expert in the range
};

Routing routing_of(const Tensor& experts, int64_t begin, int64_t end) {
  const auto flat = experts.flatten().to(at::kLong);
  const auto is_kept = flat.ge(begin).logical_and(flat.lt(end));
  const auto kept = is_kept.nonzero().flatten();
  const auto of_kept = flat.index_select(0, kept);
  const auto order = std::get<1>(at::sort(of_kept, std::optional<bool>(true), 0, false));
  return {flat, kept.index_select(0, order), at::bincount(of_kept - begin, {}, end - begin)};
}

enum CountsKind : int64_t { kRunningTotals = 0, kCounts = 1, kPairs = 2 };

void put_counts(const Routing& routing, int64_t begin, int64_t kind, const Tensor& out) {
  if (kind == kRunningTotals) return put(out, routing.counts.cumsum(0));
  if (kind == kCounts) return put(out, routing.counts);
  TORCH_CHECK(kind == kPairs, "expert_tokens_num_type ", kind, " is not emulated");
  const auto used = routing.counts.nonzero().flatten();  // pairs of an expert and its count, then zeros
  out.zero_();
  out.narrow(0, 0, used.numel()).copy_(at::stack({used + begin, routing.counts.index_select(0, used)}, 1));
}

}  // namespace

// The sum of two tensors and its norm, with a bias, which torch_npu's own operator (aclnnAddRmsNorm) lacks.
OP(AddRmsNormBias, [](Tensor first, Tensor second, Tensor weight, Tensor bias, double epsilon, Tensor out,
                      Tensor inverse, Tensor sum) {
  demand_type_of(first, "x1", second, "x2");
  demand_type_of(first, "x1", weight, "gamma");
  TORCH_CHECK(weight.dim() <= first.dim(), "gamma of shape ", weight.sizes(), " for x1 of ", first.sizes());
  Ints dims(weight.dim());
  for (int64_t index = 0; index < weight.dim(); ++index) dims[index] = first.dim() - weight.dim() + index;
  const auto added = at::add(first, second);
  const auto x = wide(added);
  const auto root = at::rsqrt(x.square().mean(dims, true) + epsilon);
  const auto normal = x * root * wide(weight);
  put(out, bias.defined() ? normal + wide(bias) : normal);
  put(inverse, root.reshape(inverse.sizes()));
  put(sum, added);
})

// Rows of tokens in the order of their experts, for those of a range; without capacities and without quantisation.
OP(MoeInitRoutingCustom,
   [](Tensor self, Tensor experts, Tensor scale, Tensor offset, int64_t most, int64_t, int64_t, int64_t pads,
      int64_t counts_kind, bool wants_counts, int64_t quantises, Ints range, int64_t places_kind, Tensor expanded,
      Tensor places, Tensor counts, Tensor expanded_scale) {
     constexpr int64_t kNotQuantised = -1, kRowOfCopy = 0;
     TORCH_CHECK(!pads, "drop_pad_mode ", pads, " is not emulated");
     TORCH_CHECK(quantises == kNotQuantised, "quant_mode ", quantises, " is not emulated");
     refuse_given("offset", offset);
     TORCH_CHECK(range.size() == 2 && range[0] <= range[1], "active_expert_range must be a first expert and an end");
     demand_int32(experts, "expertIdx");
     const auto routing = routing_of(experts, range[0], range[1]);
     const auto k = experts.size(1), kept = routing.order.numel();
     const auto rows = std::min(expanded.size(0), most > 0 ? std::min(most, kept) : kept);
     const auto tokens = routing.order.narrow(0, 0, rows).div(k, "floor");
     expanded.narrow(0, 0, rows).copy_(self.index_select(0, tokens));
     places.fill_(-1);
     if (places_kind == kRowOfCopy) places.scatter_(0, routing.order, at::arange(kept, places.options()));
     else places.narrow(0, 0, kept).copy_(routing.order);
     if (wants_counts) put_counts(routing, range[0], counts_kind, counts);
     if (scale.defined()) expanded_scale.narrow(0, 0, rows).copy_(scale.flatten().index_select(0, tokens));
   })

// Products of matrices whose dimensions are exchanged before and after; without a scale to whole numbers.
OP(TransposeBatchMatMul, [](Tensor first, Tensor second, Tensor bias, Tensor scale, Ints order1, Ints order2,
                            Ints order_out, int8_t, int32_t split, Tensor out) {
  refuse_given("bias", bias);
  refuse_given("scale", scale);
  TORCH_CHECK(split == 1, "batch_split_factor ", split, " is not emulated");
  demand_type_of(first, "x1", second, "x2");
  const auto ordered = [](const Tensor& tensor, const Ints& order) {
    return order.empty() ? tensor : tensor.permute(order);
  };
  put(out, ordered(at::bmm(ordered(operand(first), order1), ordered(operand(second), order2)), order_out));
})

#endif
