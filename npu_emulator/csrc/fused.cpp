// Fused operators of torch_npu: norms, gated activations, rotary embeddings, mixtures of experts. They compute in
// float32 and round once, as the references in op-plugin's tests do.
#include <limits>
#include <numeric>
#include <utility>

#include "grouped.h"
#include "headers.h"
#include "quantised.h"

using namespace cann;

namespace {

// Leading dimensions of `self` that a weight of `weight` dimensions is shared over.
Ints shared_dims(const Tensor& self, const Tensor& weight) {
  Ints dims;
  for (int64_t dim = 0; dim < self.dim() - weight.dim(); ++dim) dims.push_back(dim);
  return dims;
}
Ints normal_dims(const Tensor& self, const Tensor& weight) {
  TORCH_CHECK(weight.dim() <= self.dim(), "a weight of shape ", weight.sizes(), " for ", self.sizes());
  Ints dims;
  for (int64_t dim = self.dim() - weight.dim(); dim < self.dim(); ++dim) dims.push_back(dim);
  return dims;
}

void rms_norm(const Tensor& self, const Tensor& weight, double epsilon, const Tensor& out, const Tensor& inverse) {
  demand_that(weight.scalar_type() == self.scalar_type() || weight.scalar_type() == at::kFloat, "Tensor gamma",
              "must have the dtype of x or be float32");
  const auto x = wide(self);
  const auto root = at::rsqrt(x.square().mean(normal_dims(self, weight), true) + epsilon);
  put(out, x * root * wide(weight));
  if (inverse.defined()) put(inverse, root.reshape(inverse.sizes()));
}

}  // namespace

OP(RmsNorm, [](Tensor self, Tensor weight, double epsilon, Tensor out, Tensor inverse) {
  rms_norm(self, weight, epsilon, out, inverse);
})
OP(AddRmsNorm, [](Tensor first, Tensor second, Tensor weight, double epsilon, Tensor out, Tensor inverse, Tensor sum) {
  const auto added = at::add(first, second);
  rms_norm(added, weight, epsilon, out, inverse);
  put(sum, added);
})
OP(RmsNormGrad, [](Tensor gradient, Tensor self, Tensor inverse, Tensor weight, Tensor of_self, Tensor of_weight) {
  const auto dims = normal_dims(self, weight);
  auto shape = self.sizes().vec();
  for (const auto dim : dims) shape[dim] = 1;
  const auto root = wide(inverse).reshape(shape), normal = wide(self) * root;
  const auto weighted = wide(gradient) * wide(weight);
  put(of_self, root * (weighted - normal * (weighted * normal).mean(dims, true)));
  const auto product = wide(gradient) * normal;
  const auto shared = shared_dims(self, weight);
  put(of_weight, shared.empty() ? product : product.sum(shared));
})

OP(SwiGlu, [](Tensor self, int64_t dim, Tensor out) {
  const auto [gate, up] = halves_of(wide(self), dim);
  put(out, at::silu(gate) * up);
})
OP(SwiGluGrad, [](Tensor gradient, Tensor self, int64_t dim, Tensor out) {
  demand_type_of(self, "x", gradient, "yGrad");
  const auto [gate, up] = halves_of(wide(self), dim);
  const auto sigmoid = at::sigmoid(gate);
  const auto to_gate = wide(gradient) * up * (sigmoid * (1 + gate * (1 - sigmoid)));
  put(out, at::cat({to_gate, wide(gradient) * gate * sigmoid}, dim));
})

// ---- rotary position embeddings: mode 0 turns halves, 1 turns neighbours
namespace {

Tensor turned(const Tensor& self, int64_t mode) {
  if (mode == 0) {
    const auto [first, second] = halves_of(self, -1);
    return at::cat({-second, first}, -1);
  }
  TORCH_CHECK(mode == 1, "rotary mode ", mode, " is not emulated");
  const auto pairs = self.unflatten(-1, {-1, 2});
  return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

Tensor rotated(const Tensor& self, const Tensor& cos, const Tensor& sin, int64_t mode) {
  const auto x = wide(self);
  return x * wide(cos) + turned(x, mode) * wide(sin);
}

// The sum over the dimensions in which `shape` is 1, for a factor that was broadcast.
Tensor summed_to(const Tensor& product, at::IntArrayRef shape) { return at::sum_to(product, shape); }

}  // namespace

OP(RotaryPositionEmbedding, [](Tensor self, Tensor cos, Tensor sin, int64_t mode, Tensor out) {
  put(out, rotated(self, cos, sin, mode));
})
#if NPU_EMULATOR_CANN_9
// A matrix may say how elements are turned, instead of the mode.
OP(RotaryPositionEmbeddingV2, [](Tensor self, Tensor cos, Tensor sin, int64_t mode, Tensor rotate, Tensor out) {
  if (!rotate.defined()) return put(out, rotated(self, cos, sin, mode));
  const auto x = wide(self);
  put(out, x * wide(cos) + at::matmul(x, wide(rotate)) * wide(sin));
})
#endif
OP(RotaryPositionEmbeddingGrad, [](Tensor gradient, Tensor cos, Tensor sin, Tensor self, int64_t mode, Tensor of_self,
                                   Tensor of_cos, Tensor of_sin) {
  const auto given = wide(gradient);
  put(of_self, given * wide(cos) - turned(given * wide(sin), mode));
  if (!self.defined()) return;
  if (of_cos.defined()) put(of_cos, summed_to(given * wide(self), of_cos.sizes()));
  if (of_sin.defined()) put(of_sin, summed_to(given * turned(wide(self), mode), of_sin.sizes()));
})
OP(ApplyRotaryPosEmb, [](Tensor query, Tensor key, Tensor cos, Tensor sin, int64_t layout) {
  TORCH_CHECK(layout == 1, "layout ", layout, " is not emulated");
  put(query, rotated(query, cos, sin, 0));
  put(key, rotated(key, cos, sin, 0));
})
#if NPU_EMULATOR_CANN_9
OP(ApplyRotaryPosEmbV2, [](Tensor query, Tensor key, Tensor cos, Tensor sin, int64_t layout, std::string mode) {
  TORCH_CHECK(layout == 1, "layout ", layout, " is not emulated");
  TORCH_CHECK(mode == "half", "rotary_mode ", mode, " is not emulated");
  put(query, rotated(query, cos, sin, 0));
  put(key, rotated(key, cos, sin, 0));
})
#endif
// The input holds the pairs side by side, the result the halves one after the other.
OP(InterleaveRope, [](Tensor self, Tensor cos, Tensor sin, Tensor out) {
  constexpr int64_t kRope = 64;
  demand_that(self.size(-1) == kRope, "Tensor x", "must have 64 elements in its last dimension");
  const auto halves = wide(self).unflatten(-1, {-1, 2}).transpose(-1, -2).flatten(-2);
  put(out, halves * wide(cos) + turned(halves, 0) * wide(sin));
})

// ---- mixtures of experts
namespace {

// Places of the k largest along the last dimension; of equal ones the first.
Tensor largest(const Tensor& scores, int64_t k) {
  return std::get<1>(at::sort(scores, std::optional<bool>(true), -1, true)).narrow(-1, 0, k);
}

}  // namespace

// A token that is finished gets the expert one past the last, which nobody has.
OP(MoeGatingTopKSoftmax, [](Tensor self, Tensor finished, int64_t k, Tensor weights, Tensor experts, Tensor rows) {
  const auto scores = at::softmax(wide(self), -1);
  const auto chosen = largest(scores, k);
  put(weights, scores.gather(-1, chosen));
  put(experts, finished.defined() ? chosen.masked_fill(finished.unsqueeze(-1), self.size(-1)) : chosen);
  const auto row = at::arange(self.size(0), rows.options()).unsqueeze(1);
  put(rows, at::arange(k, rows.options()).unsqueeze(0) * self.size(0) + row);
})
OP(MoeGatingTopK, [](Tensor self, Tensor bias, int64_t k, int64_t kept_groups, int64_t groups, int64_t select,
                     int64_t renormalize, int64_t norm, bool, double scale, double epsilon, Tensor weights,
                     Tensor experts, Tensor normal) {
  enum { kSoftmax = 0, kSigmoid = 1, kRootOfSoftplus = 2 };
  constexpr int64_t kMostExperts = 2048;
  demand_that(kept_groups <= groups, "kGroup", "must be at most groupCount");
  demand_that(self.size(-1) <= kMostExperts, "Tensor x", "must have at most 2048 experts");
  const auto most = self.size(-1) / std::max<int64_t>(groups, 1) * kept_groups;
  demand_value(k >= 1 && k <= most, "k", "1 to " + std::to_string(most) + ", the experts of kGroup groups", k);
  demand_value(select == 0 || select == 1, "groupSelectMode", "0 or 1", select);
  demand_value(renormalize == 0 || renormalize == 1, "renorm", "0 or 1", renormalize);
  demand_value(norm >= kSoftmax && norm <= kRootOfSoftplus, "normType", "0, 1 or 2", norm);
  const auto scores = norm == kSigmoid          ? at::sigmoid(wide(self))
                      : norm == kRootOfSoftplus ? at::softplus(wide(self)).sqrt()
                                                : at::softmax(wide(self), -1);
  auto ranked = bias.defined() ? scores + wide(bias) : scores;
  if (groups > 1) {
    const auto of_groups = ranked.view({ranked.size(0), groups, -1});
    const auto best = select == 1 ? std::get<0>(of_groups.topk(2, -1)).sum(-1) : of_groups.amax(-1);
    const auto chosen = largest(best, kept_groups);
    const auto kept = at::zeros_like(best).scatter(1, chosen, 1).to(at::kBool).unsqueeze(-1).expand_as(of_groups);
    ranked = ranked.masked_fill(kept.reshape(ranked.sizes()).logical_not(), -std::numeric_limits<float>::infinity());
  }
  const auto chosen = largest(ranked, k);
  auto weight = scores.gather(1, chosen);
  const bool normalizes = norm == kSigmoid || norm == kRootOfSoftplus || renormalize == 1;
  if (normalizes) weight = weight / (weight.sum(-1, true) + epsilon);
  put(weights, weight * scale);
  put(experts, chosen);
  put(normal, scores);
})
OP(MoeInitRouting, [](Tensor self, Tensor rows, Tensor experts, int64_t, Tensor expanded, Tensor places,
                      Tensor sorted) {
  const auto [in_order, order] = at::sort(experts.flatten(), std::optional<bool>(true), 0, false);
  const auto from = rows.flatten().to(at::kLong).index_select(0, order);
  put(sorted, in_order);
  places.scatter_(0, from, at::arange(from.numel(), places.options()));
  put(expanded, self.index_select(0, from.narrow(0, 0, expanded.size(0)).remainder(self.size(0))));
})
OP(MoeComputeExpertTokens, [](Tensor sorted, int64_t experts, Tensor out) {
  put(out, at::bincount(sorted, {}, experts).narrow(0, 0, experts).cumsum(0));  // one past the last: of finished tokens
})
OP(MoeFinalizeRoutingV2, [](Tensor expanded, Tensor places, Tensor skip1, Tensor skip2, Tensor bias, Tensor scales,
                            Tensor experts, int64_t mode, Tensor out) {
  for (const auto& [tensor, name] : {std::pair(skip1, "x1"), {skip2, "x2"}, {bias, "bias"}, {scales, "scales"}})
    demand_type_of(expanded, "expandedX", tensor, name);
  const auto tokens = out.size(0);
  if (!tokens) return;
  const auto k = quotient(places.numel(), tokens);
  const bool row_by_row = mode == 2 || mode == 3;  // else the first choices of all tokens come first
  const auto order = row_by_row ? places.view({tokens, k}) : places.view({k, tokens}).t();
  const auto places_in_order = order.reshape({-1}).to(at::kLong);  // -1: the row was dropped, and adds nothing
  auto rows = wide(expanded.reshape({-1, expanded.size(-1)})).index_select(0, places_in_order.clamp_min(0));
  rows = rows.masked_fill(places_in_order.lt(0).unsqueeze(1), 0).view({tokens, k, -1});
  if (bias.defined()) rows = rows + wide(bias).index_select(0, experts.reshape({-1}).to(at::kLong)).view_as(rows);
  if (scales.defined()) rows = rows * wide(scales).unsqueeze(-1);
  auto sum = rows.sum(1);
  if (skip1.defined()) sum = sum + skip1;
  if (skip2.defined()) sum = sum + skip2;
  put(out, sum);
})
namespace {

// Which copies of tokens were kept when tokens were permuted: those that went to one of the rows.
Tensor is_row_of(const Tensor& rows, const Tensor& places) { return places.flatten().lt(rows.size(0)); }

// The row of each copy, or zeros.
Tensor rows_at(const Tensor& rows, const Tensor& places) {
  if (!rows.size(0)) return at::zeros({places.numel(), rows.size(1)}, rows.options());
  const auto found = rows.index_select(0, places.flatten().to(at::kLong).clamp_max(rows.size(0) - 1));
  return found * is_row_of(rows, places).unsqueeze(1);
}

}  // namespace

// sorted_indices[i] says where the copy i of a token went: token i // k.
OP(MoeTokenPermute, [](Tensor tokens, Tensor indices, int64_t kept, bool padded, Tensor permuted, Tensor places) {
  TORCH_CHECK(!padded, "padded_mode is not emulated");
  const auto k = indices.dim() == 2 ? indices.size(1) : 1;
  const auto order = at::argsort(indices.flatten(), true, 0, false);
  put(places, at::argsort(order, true, 0, false).view(places.sizes()));
  const auto count = kept > 0 ? std::min(kept, order.size(0)) : order.size(0);
  put(permuted, tokens.index_select(0, order.narrow(0, 0, count).div(k, "floor")));
})
OP(MoeTokenPermuteGrad, [](Tensor gradient, Tensor places, int64_t k, bool padded, Tensor out) {
  TORCH_CHECK(!padded, "padded_mode is not emulated");
  put(out, rows_at(wide(gradient), places).view({quotient(places.numel(), k), k, -1}).sum(1));
})
// The rows of each token, weighted. A copy that was left out when tokens were permuted adds nothing.
OP(MoeTokenUnpermute, [](Tensor permuted, Tensor places, Tensor weights, bool padded, Ints, Tensor out) {
  TORCH_CHECK(!padded, "padded_mode is not emulated");
  const auto k = weights.defined() ? weights.size(1) : 1;
  auto of_tokens = rows_at(wide(permuted), places).view({quotient(places.numel(), k), k, -1});
  if (weights.defined()) of_tokens = of_tokens * wide(weights).unsqueeze(-1);
  put(out, of_tokens.sum(1));
})
OP(MoeTokenUnpermuteGrad, [](Tensor permuted, Tensor gradient, Tensor places, Tensor weights, bool padded, Ints,
                             Tensor of_permuted, Tensor of_weights) {
  TORCH_CHECK(!padded, "padded_mode is not emulated");
  const auto k = weights.defined() ? weights.size(1) : 1;
  const auto of_tokens = wide(gradient).unsqueeze(1).expand({-1, k, -1});
  auto of_copies = weights.defined() ? of_tokens * wide(weights).unsqueeze(-1) : of_tokens;
  const auto kept = is_row_of(permuted, places);
  put(of_permuted, at::zeros(permuted.sizes(), at::kFloat)
                       .index_copy(0, places.flatten().masked_select(kept).to(at::kLong),
                                   of_copies.reshape({places.numel(), -1}).index({kept})));
  if (weights.defined())
    put(of_weights, (rows_at(wide(permuted), places).view(of_tokens.sizes()) * of_tokens).sum(-1));
})

#if NPU_EMULATOR_CANN_9
// ---- the same for a map of [tokens, experts] that says which experts a token has; each token has equally many
namespace {

Tensor by_expert(const Tensor& map) { return map.to(at::kBool).t(); }

// The weights of the rows, which are in order of experts, from [tokens, experts]; and back.
Tensor in_rows(const Tensor& weights, const Tensor& map) { return weights.t().masked_select(by_expert(map)); }
Tensor from_rows(const Tensor& rows, const Tensor& map) {
  return at::zeros({map.size(1), map.size(0)}, rows.options()).masked_scatter(by_expert(map), rows).t();
}

int64_t rows_of_a_token(int64_t rows, int64_t tokens) {
  TORCH_CHECK(tokens == 0 ? rows == 0 : rows % tokens == 0, "each token has to have equally many experts");
  return quotient(rows, tokens);
}

}  // namespace

OP(MoeTokenPermuteWithRoutingMap, [](Tensor tokens, Tensor map, Tensor weights, int64_t count, bool padded,
                                     Tensor permuted, Tensor permuted_weights, Tensor places) {
  TORCH_CHECK(!padded, "drop_and_pad is not emulated");
  const auto chosen = by_expert(map);
  TORCH_CHECK(map.to(at::kBool).sum(1).eq(rows_of_a_token(count, map.size(0))).all().item<bool>(),
              "each token has to have equally many experts, ", count, " altogether");
  const auto of_rows = at::arange(map.size(0), at::kLong).expand(chosen.sizes()).masked_select(chosen);
  put(permuted, tokens.index_select(0, of_rows));
  put(places, at::argsort(of_rows, true, 0, false));
  if (weights.defined()) put(permuted_weights, in_rows(weights, map));
})
OP(MoeTokenPermuteWithRoutingMapGrad, [](Tensor gradient, Tensor of_permuted_weights, Tensor places, Tensor map,
                                         int64_t, int64_t tokens, bool padded, Tensor of_tokens, Tensor of_weights) {
  TORCH_CHECK(!padded, "drop_and_pad is not emulated");
  const auto k = rows_of_a_token(places.numel(), tokens);
  put(of_tokens, rows_at(wide(gradient), places).view({tokens, k, gradient.size(1)}).sum(1));
  if (of_permuted_weights.defined()) put(of_weights, from_rows(wide(of_permuted_weights), map));
})
OP(MoeTokenUnpermuteWithRoutingMap, [](Tensor permuted, Tensor places, Tensor map, Tensor weights, bool padded, Ints,
                                       Tensor out, Tensor rows, Tensor tokens, Tensor permuted_weights) {
  TORCH_CHECK(!padded, "drop_and_pad is not emulated");
  const auto k = rows_of_a_token(places.numel(), out.size(0));
  auto weighted = wide(permuted);
  if (weights.defined()) {
    weighted = weighted * wide(in_rows(weights, map)).unsqueeze(1);
    put(permuted_weights, in_rows(weights, map));
  }
  put(out, rows_at(weighted, places).view({out.size(0), k, out.size(1)}).sum(1));
  put(rows, places);
  put(tokens, at::arange(places.numel(), at::kInt).div(std::max<int64_t>(k, 1), "floor"));
})
// Callers pass the places twice: the row places[i] is of token i // k.
OP(MoeTokenUnpermuteWithRoutingMapGrad, [](Tensor gradient, Tensor places, Tensor, Tensor map, Tensor permuted,
                                           Tensor weights, bool padded, Ints, Tensor of_permuted, Tensor of_weights) {
  TORCH_CHECK(!padded, "drop_and_pad is not emulated");
  const auto k = rows_of_a_token(places.numel(), gradient.size(0));
  auto of_rows = at::zeros({places.numel(), gradient.size(1)}, at::kFloat)
                     .index_copy(0, places.to(at::kLong), wide(gradient).repeat_interleave(k, 0));
  if (weights.defined()) {
    put(of_weights, from_rows((of_rows * wide(permuted)).sum(1), map));
    of_rows = of_rows * wide(in_rows(weights, map)).unsqueeze(1);
  }
  put(of_permuted, of_rows);
})
#endif

// ---- products of groups of rows with the weight of each group
namespace {

// Rows of each group: `list_type` 0 gives where groups end, 1 how many rows they have.
Ints rows_of_groups(Ints counts, int64_t list_type) {
  if (list_type == 0)
    for (size_t index = counts.size(); index-- > 1;) counts[index] -= counts[index - 1];
  return counts;
}
std::optional<Ints> rows_of_groups(const Tensor& list, int64_t list_type) {
  return list.defined() ? std::optional(rows_of_groups(whole_numbers(list), list_type)) : std::nullopt;
}

Tensors by_group(const Tensors& given, int64_t dims_of_one) {
  Tensors all;
  for (const auto& tensor : given) {
    if (tensor.dim() > dims_of_one) for (const auto& one : tensor.unbind(0)) all.push_back(one);
    else all.push_back(tensor);
  }
  return all;
}

struct Grouped {
  Tensors self, weights, bias, scale, offset, weight_scale, weight_offset, row_scale;
  std::optional<Ints> rows;  // of each group
  int64_t type, activation;
};

// The product of rows from `start` on with the weight of a group. Whole numbers have scales; weights of whole numbers for
// other rows have scales and offsets of their own, which come first.
void product_of_group(const Grouped& call, const Tensor& rows, int64_t start, size_t group, const Tensor& out) {
  const auto weight = by_group(call.weights, 2).at(group);
  const auto of_group = [&](const Tensors& given) { return given.empty() ? Tensor() : by_group(given, 1).at(group); };
  const auto bias = of_group(call.bias);
  if (!call.weight_scale.empty()) {
    const auto shifted = wide(whole_operand(weight)) + wide(of_group(call.weight_offset));
    const auto result = at::matmul(wide(rows), shifted * wide(of_group(call.weight_scale)));
    put(out, bias.defined() ? result + wide(bias) : result);
  } else if (rows.scalar_type() == at::kChar || rows.scalar_type() == at::kInt) {
    const auto of_rows =
        call.row_scale.empty() ? Tensor() : call.row_scale[0].flatten().narrow(0, start, rows.size(0));
    quant_matmul(rows, weight, of_group(call.scale), of_group(call.offset), of_rows, bias, out);
  } else {
    demand_type_of(rows, "x", weight, "weight");
    const auto result = at::matmul(operand(rows), operand(weight));
    put(out, bias.defined() ? result + operand(bias) : result);
  }
}

void grouped_matmul(const Grouped& call, const Tensors& out) {
  enum { kNotGrouped = -1, kRows = 0, kReducedColumns = 2 };
  TORCH_CHECK(call.activation == 0, "act_type ", call.activation, " is not emulated");
  if (call.type == kReducedColumns) {
    // Each group's columns of x with its rows of the weight: [m, k] and [k, n] give [groups, m, n].
    Tensors products;
    int64_t start = 0;
    for (const auto count : call.rows.value()) {
      const auto columns = call.self.at(0).narrow(1, start, count), rows = call.weights.at(0).narrow(0, start, count);
      products.push_back(at::matmul(operand(columns), operand(rows)));
      start += count;
    }
    if (out.size() == 1) put(out[0], at::stack(products).view(out[0].sizes()));
    else put(out, products);
    return;
  }
  TORCH_CHECK(call.type == kNotGrouped || call.type == kRows, "group_type ", call.type, " is not emulated");
  const bool is_split = call.self.size() > 1 || !call.rows;
  const auto counts = is_split ? Ints() : *call.rows;
  const auto groups = is_split ? call.self.size() : counts.size(), weights = by_group(call.weights, 2).size();
  TORCH_CHECK(is_split || groups == weights, "group_list has ", groups, " entries for ", weights, " groups");
  int64_t start = 0;
  for (size_t group = 0; group < groups; ++group) {
    const auto count = is_split ? call.self[group].size(0) : counts[group];
    const auto rows = is_split ? call.self[group] : call.self.at(0).narrow(0, start, count);
    const auto to = out.size() == 1 && groups > 1 ? out[0].narrow(0, start, count) : out.at(group);
    if (count) product_of_group(call, rows, start, group, to);
    start += count;
  }
}

Tensors matrices(const Weights& weights) { return {weights.begin(), weights.end()}; }

}  // namespace

OP(GroupedMatmulV2,
   [](Tensors self, Weights weights, Tensors bias, Tensors scale, Tensors offset, Tensors weight_scale,
      Tensors weight_offset, Ints list, int64_t, int64_t type, Tensors out) {
     const auto rows = list.empty() ? std::nullopt : std::optional(rows_of_groups(list, 0));
     grouped_matmul({self, matrices(weights), bias, scale, offset, weight_scale, weight_offset, {}, rows, type, 0}, out);
   })
OP(GroupedMatmulV4,
   [](Tensors self, Weights weights, Tensors bias, Tensors scale, Tensors offset, Tensors weight_scale,
      Tensors weight_offset, Tensors row_scale, Tensor list, Tensors, Tensors, Tensors, int64_t, int64_t type,
      int64_t list_type, int64_t activation, Tensors out, Tensors, Tensors) {
     grouped_matmul({self, matrices(weights), bias, scale, offset, weight_scale, weight_offset, row_scale,
                     rows_of_groups(list, list_type), type, activation}, out);
   })
OP(GroupedMatmulV5,
   [](Tensors self, Weights weights, Tensors bias, Tensors scale, Tensors offset, Tensors weight_scale,
      Tensors weight_offset, Tensors row_scale, Tensor list, Tensors, Tensors, Tensors, int64_t, int64_t type,
      int64_t list_type, int64_t activation, Ints, Tensors out, Tensors, Tensors) {
     grouped_matmul({self, matrices(weights), bias, scale, offset, weight_scale, weight_offset, row_scale,
                     rows_of_groups(list, list_type), type, activation}, out);
   })
void cann::add_products_of_groups(const Tensor& self, const Tensor& weight, const Tensor& list, const Tensor& total) {
  const auto counts = rows_of_groups(whole_numbers(list), 0);
  demand_that(std::accumulate(counts.begin(), counts.end(), int64_t{0}) == self.size(0), "Tensor groupList",
              "must add up to the rows of x");
  const auto sums = total.view({static_cast<int64_t>(counts.size()), self.size(1), weight.size(1)});
  int64_t start = 0;
  for (size_t group = 0; group < counts.size(); start += counts[group++]) {
    const auto rows = self.narrow(0, start, counts[group]), others = weight.narrow(0, start, counts[group]);
    if (counts[group]) sums[group].addmm_(operand(rows).t(), operand(others));
  }
}
OP(GroupedMatmulAdd, [](Tensor self, Tensor weight, Tensor list, Tensor total, bool is_turned, bool is_weight_turned,
                        int64_t type) {
  constexpr int64_t kReducedRows = 2;
  TORCH_CHECK(is_turned && !is_weight_turned && type == kReducedRows,
              "transpose_x must be true, transpose_weight false and group_type 2, not ", is_turned, ", ",
              is_weight_turned, " and ", type);
  TORCH_CHECK(at::isReducedFloatingType(self.scalar_type()) && self.scalar_type() == weight.scalar_type() &&
                  total.scalar_type() == at::kFloat,
              "x and weight must have the same type of 16 bits, and y float32, not ", self.scalar_type(), ", ",
              weight.scalar_type(), " and ", total.scalar_type());
  demand_that(self.numel(), "Tensor x", "must not be empty");
  add_products_of_groups(self, weight, list, total);
})
OP(GroupedMatmulWeightNz,
   [](Tensors self, Weights weights, Tensors bias, Tensors scale, Tensors offset, Tensors weight_scale,
      Tensors weight_offset, Tensors row_scale, Tensor list, Tensors, Tensors, Tensors, int64_t, int64_t type,
      int64_t list_type, int64_t activation, Ints, int64_t group_size, Tensors out, Tensors, Tensors) {
     TORCH_CHECK(group_size == 0, "quantPerGroupSize ", group_size, " is not emulated");
     grouped_matmul({self, matrices(weights), bias, scale, offset, weight_scale, weight_offset, row_scale,
                     rows_of_groups(list, list_type), type, activation}, out);
   })
