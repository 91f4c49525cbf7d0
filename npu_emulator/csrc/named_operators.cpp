// Operators of CANN's older interface that torch_npu has in it alone, and those that it still reaches there by functions
// of its own (torch_npu.npu_silu, npu_bmmV2 and their like).
#include "named_operators.h"

#include <algorithm>
#include <cmath>

using namespace cann;

namespace {

// Round to the nearest, then add the offset; the type of the result says how far numbers reach.
void quantize(const NamedCall& call) {
  const auto& in = call.in;
  auto values = at::round(wide(in.at(0)) / wide(in.at(1)));
  if (in.size() > 2 && in.at(2).defined()) values = values + in.at(2);
  if (call.out.at(0).scalar_type() == at::kChar) values = values.clamp(-128, 127);
  else if (call.out.at(0).scalar_type() == at::kByte) values = values.clamp(0, 255);
  put(call.out.at(0), values);
}

void fast_gelu(const NamedCall& call) {
  const auto x = wide(call.in.at(0));
  put(call.out.at(0), x * at::sigmoid(1.702 * x));
}

// The hidden elements of scores: a triangle, or those of the mask.
Tensor hidden_scores(const NamedCall& call, const Tensor& mask) {
  const auto& scores = call.out.at(0);
  if (!call.attributes.at("fixed_triu_mask")) return mask.to(at::kBool);
  return at::ones({scores.size(-2), scores.size(-1)}, at::kBool).triu(1);
}
void scaled_masked_softmax(const NamedCall& call) {
  constexpr double kHidden = -10000;
  const auto scores = wide(call.in.at(0)) * call.attributes.at("scale");
  put(call.out.at(0), scores.masked_fill(hidden_scores(call, call.in.at(1)), kHidden).softmax(-1));
}
void scaled_masked_softmax_gradient(const NamedCall& call) {
  const auto product = wide(call.in.at(0)) * wide(call.in.at(1));
  const auto of_scores = product - wide(call.in.at(1)) * product.sum(-1, true);
  put(call.out.at(0), (of_scores * call.attributes.at("scale")).masked_fill(hidden_scores(call, call.in.at(2)), 0));
}

// The powers of beta1 and beta2 are those of the step before.
void apply_adam_w(const NamedCall& call) {
  TORCH_CHECK(!call.attributes.at("amsgrad"), "amsgrad is not emulated");
  const auto number = [&](size_t index) { return call.in.at(index).item<double>(); };
  const double rate = number(5), beta1 = number(7), beta2 = number(8);
  const double rest1 = 1 - number(3) * beta1, rest2 = 1 - number(4) * beta2;
  const auto gradient = call.attributes.at("maximize") ? -wide(call.in.at(10)) : wide(call.in.at(10));
  const auto mean = wide(call.in.at(1)) * beta1 + gradient * (1 - beta1);
  const auto square = wide(call.in.at(2)) * beta2 + gradient.square() * (1 - beta2);
  const auto step = mean / rest1 / ((square / rest2).sqrt() + number(9));
  put(call.out, {wide(call.in.at(0)) * (1 - rate * number(6)) - rate * step, mean, square});
}

// As the document of CANN's ApplyAdamV2 has it, which corrects no bias. op-plugin gives a largest norm below zero where
// gradients are not to be made shorter, and a step of its own in the mode "mbart_adam" alone.
void apply_adam_v2(const NamedCall& call) {
  const auto number = [&](size_t index) { return call.in.at(index).item<double>(); };
  const double rate = number(3), beta1 = number(4), beta2 = number(5), most = number(8), norm = number(9);
  const bool of_mbart = call.words.at("adam_mode") == "mbart_adam";
  const auto gradient = wide(call.in.at(7)) * (!of_mbart && most > 0 && norm > most ? most / norm : 1.0);
  const auto mean = wide(call.in.at(1)) * beta1 + gradient * (1 - beta1);
  const auto square = wide(call.in.at(2)) * beta2 + gradient.square() * (1 - beta2);
  const auto update = mean / (square.sqrt() + number(6));
  const double step = of_mbart && call.in.size() > 11 ? number(11) : rate;
  put(call.out, {wide(call.in.at(0)) * (1 - rate * number(10)) - step * update, mean, square});
}

// Numbers from the generator's seed, the only key, and its offset, the second part of the counter.
void random_normal(const NamedCall& call) {
  const auto key = whole_numbers(call.in.at(1)), counter = whole_numbers(call.in.at(2));
  const auto& out = call.out.at(0);
  out.copy_(at::empty(out.sizes(), at::kFloat).normal_(0, 1, generator(key.at(0), counter.at(1))));
}

// op-plugin writes infinity as the first or the last whole number of 32 bits.
double power(const NamedCall& call) {
  constexpr double kLargest = 2147483520;  // below these, and in float32
  const auto p = call.attributes.at("p");
  return std::abs(p) > kLargest ? std::copysign(INFINITY, p) : p;
}
// The first half of a norm: that of which the second takes the root.
void sum_of_powers(const NamedCall& call) {
  const auto p = power(call);
  const auto& dims = call.lists.at("axes");
  const bool keep = call.attributes.at("keepdim");
  const auto sizes = at::abs(call.in.at(0));
  if (std::isinf(p)) return put(call.out.at(0), p > 0 ? at::amax(sizes, dims, keep) : at::amin(sizes, dims, keep));
  put(call.out.at(0), at::sum(p == 0 ? (sizes != 0).to(sizes.scalar_type()) : at::pow(sizes, p), dims, keep));
}
void root_of_sum(const NamedCall& call) {
  const auto p = power(call);
  put(call.out.at(0), p == 0 || std::isinf(p) ? call.in.at(0) : at::pow(call.in.at(0), 1 / p));
}
void singular_values(const NamedCall& call) {
  if (!call.attributes.at("compute_uv")) return put(call.out.at(0), at::linalg_svdvals(call.in.at(0)));
  const auto [u, values, transposed_v] = at::linalg_svd(call.in.at(0), call.attributes.at("full_matrices"));
  put(call.out, {values, u, transposed_v.mT()});
}
void triangular_solution(const NamedCall& call) {
  const bool lower = call.attributes.at("lower"), transposed = call.attributes.at("adjoint");
  put(call.out.at(0),
      at::linalg_solve_triangular(transposed ? call.in.at(0).mT() : call.in.at(0), call.in.at(1), lower == transposed));
}
void powers_between(const NamedCall& call) {
  const auto& of = call.attributes;
  const auto options = call.out.at(0).options();
  put(call.out.at(0), at::logspace(of.at("start"), of.at("end"), call.in.at(0).numel(), of.at("base"), options));
}

// Both get each row of one beside each row of the other; a negative power stands for infinity.
double power_of_distance(const NamedCall& call) {
  const auto p = call.attributes.at("p");
  return p < 0 ? INFINITY : p;
}
void distances(const NamedCall& call) {
  put(call.out.at(0), at::linalg_vector_norm(call.in.at(0) - call.in.at(1), power_of_distance(call), {-1}));
}
void gradient_of_distances(const NamedCall& call) {
  const auto& in = call.in;
  put(call.out.at(0), at::_cdist_backward(in.at(0).select(-1, 0), in.at(1).select(-2, 0), in.at(2).select(-3, 0),
                                       power_of_distance(call), in.at(3).select(-1, 0)));
}

// The normalised tensor, and the mean and the reciprocal of the deviation of what was normalised together.
void layer_norm(const NamedCall& call) {
  const auto& in = call.in;
  const auto first = static_cast<size_t>(call.attributes.at("begin_norm_axis"));
  const auto [values, mean, deviation] = at::native_layer_norm(
      wide(in.at(0)), in.at(0).sizes().slice(first), wide(in.at(1)), wide(in.at(2)), call.attributes.at("epsilon"));
  put(call.out, {values, mean, deviation});
}

// A part of a tensor: in every dimension the first element, and how many.
void slice(const NamedCall& call) {
  const auto first = call.in.at(1).to(at::kLong), sizes = call.in.at(2).to(at::kLong);
  auto part = call.in.at(0);
  for (int64_t dim = 0; dim < part.dim(); ++dim)
    part = part.narrow(dim, first[dim].item<int64_t>(), sizes[dim].item<int64_t>());
  put(call.out.at(0), part);
}

// Swish, and its gradient for a scale of one, which torch_npu asks for.
void swish(const NamedCall& call) {
  const auto x = wide(call.in.at(0));
  put(call.out.at(0), x * at::sigmoid(call.attributes.at("scale") * x));
}
void swish_gradient(const NamedCall& call) {
  put(call.out.at(0), at::silu_backward(wide(call.in.at(0)), wide(call.in.at(1))));
}

// Products of matrices, either transposed; a vector is added to rows.
void product(const NamedCall& call, const char* first, const char* second) {
  const auto laid = [&](size_t index, const char* transposed) {
    const auto matrix = operand(call.in.at(index));
    return call.attributes.at(transposed) ? matrix.mT() : matrix;
  };
  const auto product = at::matmul(laid(0, first), laid(1, second));
  put(call.out.at(0), call.in.size() > 2 && call.in.at(2).defined() ? product + operand(call.in.at(2)) : product);
}

// The largest or smallest along a dimension, and where the first of them is.
template <class Find>
void along_dimension(const NamedCall& call, Find find) {
  const auto [values, places] =
      find(call.in.at(0), static_cast<int64_t>(call.attributes.at("dimension")), call.attributes.at("keep_dims") != 0);
  put(call.out, {places, values});
}

// The last dimension of the result has the classes; the numbers for a hit and for the others are the inputs from `on`.
template <size_t on>
void one_hot(const NamedCall& call) {
  const auto& in = call.in;
  TORCH_CHECK(call.attributes.at("axis") == -1, "OneHot along another axis than the last is not emulated");
  const auto classes = at::arange(call.out.at(0).size(-1), in.at(0).options().dtype(at::kLong));
  put(call.out.at(0), at::where(in.at(0).unsqueeze(-1) == classes, in.at(on), in.at(on + 1)));
}

// Zeros before and after each dimension, as pairs from the first dimension on.
void pad(const NamedCall& call) {
  auto pairs = whole_numbers(call.in.at(1));
  for (size_t index = 0; index + 1 < pairs.size(); index += 2) std::swap(pairs[index], pairs[index + 1]);
  std::reverse(pairs.begin(), pairs.end());  // ATen counts from the last dimension
  put(call.out.at(0), at::constant_pad_nd(call.in.at(0), pairs));
}

// torch_npu makes room for what lies between begin and end, whatever a mask says.
void strided_slice(const NamedCall& call) {
  for (const auto& [name, bits] : call.attributes) TORCH_CHECK(!bits, "StridedSlice with ", name, " is not emulated");
  const auto begin = whole_numbers(call.in.at(1)), end = whole_numbers(call.in.at(2));
  const auto strides = whole_numbers(call.in.at(3));
  auto part = call.in.at(0);
  for (size_t dim = 0; dim < begin.size(); ++dim) part = part.slice(dim, begin[dim], end.at(dim), strides.at(dim));
  put(call.out.at(0), part);
}

void softmax_cross_entropy(const NamedCall& call) {
  const auto scores = wide(call.in.at(0)), labels = wide(call.in.at(1));
  put(call.out, {-(labels * scores.log_softmax(-1)).sum(-1), scores.softmax(-1) - labels});
}

// A transposition and a change of shape, in either order.
void confusion_transpose(const NamedCall& call) {
  const auto &order = call.lists.at("perm"), &shape = call.lists.at("shape");
  const bool first = call.attributes.at("transpose_first");
  put(call.out.at(0), first ? call.in.at(0).permute(order).reshape(shape) : call.in.at(0).reshape(shape).permute(order));
}

// A number for each bit, from the lowest of each byte: 1 where it is set, and -1.
void unpack_signs(const NamedCall& call) {
  const auto bits = at::bitwise_right_shift(call.in.at(0).unsqueeze(-1), at::arange(8, call.in.at(0).options()));
  put(call.out.at(0), (at::bitwise_and(bits, 1).to(at::kFloat) * 2 - 1).view(call.out.at(0).sizes()));
}

constexpr NamedOperator kNamed[] = {
    {"Quantize", &quantize},
    {"FastGelu", &fast_gelu},
    {"ScaledMaskedSoftmax", &scaled_masked_softmax},
    {"ScaledMaskedSoftmaxGrad", &scaled_masked_softmax_gradient},
    {"ApplyAdamW", &apply_adam_w},
    {"LayerNormV3", &layer_norm},
    {"LogSigmoid", [](const NamedCall& call) { put(call.out.at(0), at::log_sigmoid(call.in.at(0))); }},
    {"LpNormReduceV2", &sum_of_powers},
    {"LpNormUpdateV2", &root_of_sum},
    {"Svd", &singular_values},
    {"MatrixTriangularSolve", &triangular_solution},
    {"LogSpaceD", &powers_between},
    {"Cdist", &distances},
    {"CdistGrad", &gradient_of_distances},
    {"Slice", &slice},
    {"BitwiseXor", [](const NamedCall& call) { put(call.out.at(0), at::bitwise_xor(call.in.at(0), call.in.at(1))); }},
    {"LeftShift",
     [](const NamedCall& call) { put(call.out.at(0), at::bitwise_left_shift(call.in.at(0), call.in.at(1))); }},
    {"RightShift",
     [](const NamedCall& call) { put(call.out.at(0), at::bitwise_right_shift(call.in.at(0), call.in.at(1))); }},
    {"ApplyAdamV2", &apply_adam_v2},
    {"Abs", [](const NamedCall& call) { put(call.out.at(0), at::abs(call.in.at(0))); }},
    {"Add", [](const NamedCall& call) { put(call.out.at(0), at::add(call.in.at(0), call.in.at(1))); }},
    {"ArgMaxWithValue",
     [](const NamedCall& call) {
       along_dimension(call, [](const auto& x, int64_t dim, bool keep) { return at::max(x, dim, keep); });
     }},
    {"ArgMinWithValue",
     [](const NamedCall& call) {
       along_dimension(call, [](const auto& x, int64_t dim, bool keep) { return at::min(x, dim, keep); });
     }},
    {"BatchMatMul", [](const NamedCall& call) { product(call, "adj_x1", "adj_x2"); }},
    {"BroadcastTo",
     [](const NamedCall& call) { put(call.out.at(0), call.in.at(0).expand(whole_numbers(call.in.at(1)))); }},
    {"Cast", [](const NamedCall& call) { put(call.out.at(0), call.in.at(0)); }},
    {"ConfusionTransposeD", &confusion_transpose},
    {"Equal", [](const NamedCall& call) { put(call.out.at(0), at::eq(call.in.at(0), call.in.at(1))); }},
    {"Fill", [](const NamedCall& call) { put(call.out.at(0), call.in.at(1).expand(call.out.at(0).sizes())); }},
    {"Greater", [](const NamedCall& call) { put(call.out.at(0), at::gt(call.in.at(0), call.in.at(1))); }},
    {"GreaterEqual", [](const NamedCall& call) { put(call.out.at(0), at::ge(call.in.at(0), call.in.at(1))); }},
    {"Identity", [](const NamedCall& call) { put(call.out.at(0), call.in.at(0).view(call.out.at(0).sizes())); }},
    {"IsFinite", [](const NamedCall& call) { put(call.out.at(0), at::isfinite(call.in.at(0))); }},
    {"Less", [](const NamedCall& call) { put(call.out.at(0), at::lt(call.in.at(0), call.in.at(1))); }},
    {"LessEqual", [](const NamedCall& call) { put(call.out.at(0), at::le(call.in.at(0), call.in.at(1))); }},
    {"MatMul", [](const NamedCall& call) { product(call, "transpose_x1", "transpose_x2"); }},
    {"MatMulV2", [](const NamedCall& call) { product(call, "transpose_x1", "transpose_x2"); }},
    {"Mish", [](const NamedCall& call) { put(call.out.at(0), at::mish(wide(call.in.at(0)))); }},
    {"MishGrad",
     [](const NamedCall& call) { put(call.out.at(0), at::mish_backward(wide(call.in.at(0)), wide(call.in.at(1)))); }},
    {"Mul", [](const NamedCall& call) { put(call.out.at(0), at::mul(call.in.at(0), call.in.at(1))); }},
    {"NotEqual", [](const NamedCall& call) { put(call.out.at(0), at::ne(call.in.at(0), call.in.at(1))); }},
    {"OneHot", &one_hot<2>},
    {"OneHotD", &one_hot<1>},
    {"Pad", &pad},
    {"RealDiv", [](const NamedCall& call) { put(call.out.at(0), at::div(call.in.at(0), call.in.at(1))); }},
    {"ReduceAll",
     [](const NamedCall& call) {
       put(call.out.at(0), at::all(call.in.at(0), whole_numbers(call.in.at(1)), call.attributes.at("keep_dims")));
     }},
    {"ReduceMax",
     [](const NamedCall& call) {
       put(call.out.at(0), at::amax(call.in.at(0), whole_numbers(call.in.at(1)), call.attributes.at("keep_dims")));
     }},
    {"SignBitsUnpack", &unpack_signs},
    {"SoftmaxCrossEntropyWithLogits", &softmax_cross_entropy},
    {"SoftmaxV2",
     [](const NamedCall& call) {
       const auto& axes = call.lists.at("axes");
       TORCH_CHECK(axes.size() == 1, "SoftmaxV2 over ", axes.size(), " dimensions is not emulated");
       put(call.out.at(0), at::softmax(operand(call.in.at(0)), axes[0]));
     }},
    {"StatelessRandomNormalV2", &random_normal},
    {"StridedSlice", &strided_slice},
    {"Sub", [](const NamedCall& call) { put(call.out.at(0), at::sub(call.in.at(0), call.in.at(1))); }},
    {"Swish", &swish},
    {"SwishGrad", &swish_gradient},
    {"TensorEqual",
     [](const NamedCall& call) { call.out.at(0).fill_(at::equal(call.in.at(0), call.in.at(1))); }},
    {"Transpose",
     [](const NamedCall& call) { put(call.out.at(0), call.in.at(0).permute(whole_numbers(call.in.at(1)))); }},
    {"ZerosLike", [](const NamedCall& call) { call.out.at(0).zero_(); }},
};

// Rows that are equal are one; with it, where each row of the input went, and how many went there.
Tensors unique_rows(const NamedCall& call) {
  const auto dim = call.in.at(1).item<int64_t>();
  const auto [rows, inverse, counts] =
      at::unique_dim(call.in.at(0), dim, call.attributes.at("sorted"), call.attributes.at("return_inverse"), true);
  return {rows, Tensor(), counts, inverse};
}
Tensors unique_values(const NamedCall& call) {
  const bool inverse = call.attributes.at("return_inverse"), counts = call.attributes.at("return_counts");
  const auto [values, places, each] = at::_unique2(call.in.at(0), true, inverse, counts);
  return {values, inverse ? places : Tensor(), counts ? each : Tensor()};
}
Tensors unique_runs(const NamedCall& call) {
  const bool inverse = call.attributes.at("return_idx"), counts = call.attributes.at("return_counts");
  const auto axis = call.attributes.find("axis");
  const auto dim = axis == call.attributes.end() ? std::nullopt : std::optional<int64_t>(axis->second);
  const auto [values, places, each] = at::unique_consecutive(call.in.at(0), inverse, counts, dim);
  return {values, inverse ? places : Tensor(), counts ? each : Tensor()};
}

constexpr SizedOperator kSized[] = {
    {"MaskedSelect", [](const NamedCall& call) { return Tensors{at::masked_select(call.in.at(0), call.in.at(1))}; }},
    {"NonZero",
     [](const NamedCall& call) {
       const auto places = at::nonzero(call.in.at(0));
       return Tensors{call.attributes.at("transpose") ? places.t() : places};
     }},
    {"UniqueConsecutive", &unique_runs},
    {"UniqueWithCountsAndSorting", &unique_values},
    {"UniqueWithCountsExt2", &unique_rows},
};

template <class Operators>
auto find_by_name(const Operators& operators, const std::string& name) -> decltype(std::begin(operators)) {
  const auto found =
      std::find_if(std::begin(operators), std::end(operators), [&](const auto& each) { return name == each.name; });
  return found == std::end(operators) ? nullptr : found;
}

}  // namespace

const NamedOperator* cann::named_operator(const std::string& name) { return find_by_name(kNamed, name); }
const SizedOperator* cann::sized_operator(const std::string& name) { return find_by_name(kSized, name); }
