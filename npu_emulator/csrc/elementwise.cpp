// Operators on one tensor, element by element, and what fills a tensor.
#include <algorithm>
#include <cstring>

#include "headers.h"
#include "meters.h"
#include "operators.h"

using namespace cann;

namespace {

// The dimension along which elements are neighbours in memory; -1 if there is none.
int64_t dimension_of_neighbours(const Tensor& tensor) {
  for (int64_t dimension = 0; dimension < tensor.dim(); ++dimension)
    if (tensor.size(dimension) > 1 && tensor.stride(dimension) == 1) return dimension;
  return -1;
}

void count_copy(const Tensor& to, const Tensor& from) {
  const auto bytes = static_cast<int64_t>(to.nbytes());
  npu::meters::count_copy(npu::meters::Copy::kDeviceToDevice, bytes);
  if (to.dim() == from.dim() && dimension_of_neighbours(to) != dimension_of_neighbours(from))
    npu::meters::count_copy(npu::meters::Copy::kTransposing, bytes);
}

// The elements on and above a diagonal, or on and below it; the others are zero. A row at a time: torch's kernel goes
// element by element, and torch_npu has a mask of 2048 x 2048 made for every causal attention.
// Example: with `upper` and diagonal 0, row number 1, [a b c d], gets one leading zero: [0 b c d].
void put_triangle(const Tensor& self, int64_t diagonal, bool upper, const Tensor& out) {
  const bool has_rows = out.sizes() == self.sizes() && out.scalar_type() == self.scalar_type() && self.numel() &&
                        self.dim() >= 2 && self.is_contiguous() && out.is_contiguous();
  if (!has_rows) return put(out, upper ? at::triu(self, diagonal) : at::tril(self, diagonal));
  const int64_t columns = self.size(-1), in_matrix = self.size(-2), width = self.element_size();
  const char* from = static_cast<const char*>(self.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  for (int64_t row = 0; row < self.numel() / columns; ++row, from += columns * width, to += columns * width) {
    const auto middle = std::clamp<int64_t>(row % in_matrix + diagonal + (upper ? 0 : 1), 0, columns) * width;
    const auto kept = upper ? columns * width - middle : middle, start = upper ? middle : 0;
    std::memmove(to + start, from + start, kept);
    std::memset(to + (upper ? 0 : middle), 0, columns * width - kept);
  }
}

}  // namespace

#define UNARY(NAME, FUNCTION) OP(NAME, [](Tensor self, Tensor out) { put(out, FUNCTION(self)); })
#define UNARY_IN_PLACE(NAME, FUNCTION) \
  UNARY(NAME, FUNCTION)                \
  OP(Inplace##NAME, [](Tensor self) { put_back(self, FUNCTION(self)); })

UNARY(Abs, at::abs)
UNARY_IN_PLACE(Acos, at::acos)
UNARY_IN_PLACE(Acosh, at::acosh)
UNARY_IN_PLACE(Asin, at::asin)
UNARY_IN_PLACE(Asinh, at::asinh)
UNARY_IN_PLACE(Atan, at::atan)
UNARY_IN_PLACE(Atanh, at::atanh)
UNARY(BitwiseNot, at::bitwise_not)
UNARY_IN_PLACE(Ceil, at::ceil)
UNARY_IN_PLACE(Cos, at::cos)
UNARY_IN_PLACE(Cosh, at::cosh)
UNARY_IN_PLACE(Erf, at::erf)
UNARY_IN_PLACE(Erfc, at::erfc)
UNARY_IN_PLACE(Erfinv, at::erfinv)
UNARY_IN_PLACE(Exp, at::exp)
UNARY_IN_PLACE(Exp2, at::exp2)
UNARY_IN_PLACE(Expm1, at::expm1)
UNARY_IN_PLACE(Floor, at::floor)
UNARY_IN_PLACE(Frac, at::frac)
UNARY_IN_PLACE(Hardsigmoid, at::hardsigmoid)
UNARY_IN_PLACE(Hardswish, at::hardswish)
UNARY(IsFinite, at::isfinite)
UNARY(IsNegInf, at::isneginf)
UNARY(IsPosInf, at::isposinf)
UNARY_IN_PLACE(Log, at::log)
UNARY_IN_PLACE(Log10, at::log10)
UNARY_IN_PLACE(Log1p, at::log1p)
UNARY_IN_PLACE(Log2, at::log2)
UNARY_IN_PLACE(LogicalNot, at::logical_not)
UNARY_IN_PLACE(Mish, at::mish)
UNARY(Neg, at::neg)
UNARY_IN_PLACE(Reciprocal, at::reciprocal)
UNARY_IN_PLACE(Relu, at::relu)
UNARY_IN_PLACE(Round, at::round)
UNARY_IN_PLACE(Rsqrt, at::rsqrt)
UNARY_IN_PLACE(Sigmoid, at::sigmoid)
UNARY(Sign, at::sgn)
UNARY(Signbit, at::signbit)
UNARY(Silu, at::silu)
UNARY_IN_PLACE(Sin, at::sin)
UNARY_IN_PLACE(Sinc, at::sinc)
UNARY_IN_PLACE(Sinh, at::sinh)
UNARY_IN_PLACE(Sqrt, at::sqrt)
UNARY_IN_PLACE(Tan, at::tan)
UNARY_IN_PLACE(Tanh, at::tanh)
UNARY_IN_PLACE(Trunc, at::trunc)

OP(RoundDecimals, [](Tensor self, int64_t decimals, Tensor out) { put(out, at::round(self, decimals)); })
OP(AngleV2, [](Tensor self, Tensor out) { put(out, at::angle(self)); })
// A negative bound stands for none.
OP(Logit, [](Tensor self, double bound, Tensor out) {
  put(out, at::logit(operand(self), bound < 0 ? std::nullopt : std::optional<double>(bound)));
})
OP(LogitGrad, [](Tensor self, Tensor gradient, double bound, Tensor out) {
  const auto kept = bound < 0 ? std::nullopt : std::optional<double>(bound);
  put(out, at::logit_backward(operand(gradient), operand(self), kept));
})
OP(NanToNum, [](Tensor self, float nan, float above, float below, Tensor out) {
  put(out, at::nan_to_num(self, nan, above, below));
})
OP(Cast, [](Tensor self, DType, Tensor out) { put(out, self); })
OP(InplaceCopy, [](Tensor self, Tensor from) {
  count_copy(self, from);
  self.copy_(from);
})
OP(InplaceOne, [](Tensor self) {
  // torch_npu makes a mask of 2048 x 2048 for every causal attention, and torch fills bytes one by one.
  if (self.element_size() == 1 && self.is_contiguous()) std::memset(self.data_ptr(), 1, self.nbytes());
  else self.fill_(1);
})
OP(InplaceZero, [](Tensor self) { self.zero_(); })
OP(InplaceFillScalar, [](Tensor self, Scalar value) { self.fill_(value); })
OP(InplaceFillTensor, [](Tensor self, Tensor value) { self.fill_(value.reshape({})); })
OP(Arange, [](Scalar start, Scalar end, Scalar step, Tensor out) {
  put(out, at::arange(start, end, step, out.options()));
})
OP(Range, [](Scalar start, Scalar end, Scalar step, Tensor out) {  // with its end
  put(out, at::range(start, end, step, out.options()));
})
OP(Linspace, [](Scalar start, Scalar end, int64_t steps, Tensor out) {
  put(out, at::linspace(start, end, steps, out.options()));
})
OP(Eye, [](int64_t rows, int64_t columns, Tensor out) { put(out, at::eye(rows, columns, out.options())); })
OP(Triu, [](Tensor self, int64_t diagonal, Tensor out) { put_triangle(self, diagonal, true, out); })
OP(Tril, [](Tensor self, int64_t diagonal, Tensor out) { put_triangle(self, diagonal, false, out); })
OP(InplaceTriu, [](Tensor self, int64_t diagonal) { self.triu_(diagonal); })
OP(InplaceTril, [](Tensor self, int64_t diagonal) { self.tril_(diagonal); })

// ---- random numbers, from the seed and the offset that torch_npu's generator gives
namespace {

// torch_npu draws the mask of dropout a bit for each element, in bytes.
void put_dropout_mask(const Ints& shape, double p, const at::Generator& random, const Tensor& out) {
  int64_t count = 1;
  for (const auto size : shape) count *= size;
  auto bits = at::zeros({out.numel() * 8}, at::kByte);
  bits.narrow(0, 0, count).bernoulli_(1 - p, random);
  const auto places = at::arange(8, at::kByte);
  put(out, bits.view({-1, 8}).bitwise_left_shift(places).sum(1, false, at::kByte).view(out.sizes()));
}

}  // namespace

OP(InplaceNormal, [](Tensor self, float mean, float deviation, int64_t seed, int64_t offset) {
  self.normal_(mean, deviation, generator(seed, offset));
})
OP(InplaceUniform, [](Tensor self, double low, double high, uint64_t seed, uint64_t offset) {
  self.uniform_(low, high, generator(seed, offset));
})
OP(InplaceRandom, [](Tensor self, int64_t low, int64_t high, int64_t seed, int64_t offset) {
  self.random_(low, high, generator(seed, offset));
})
OP(InplaceBernoulli, [](Tensor self, Scalar p, int64_t seed, int64_t offset) {
  self.bernoulli_(p.toDouble(), generator(seed, offset));
})
OP(InplaceBernoulliTensor, [](Tensor self, Tensor p, int64_t seed, int64_t offset) {
  self.bernoulli_(p, generator(seed, offset));
})
OP(NormalTensorTensor, [](Tensor mean, Tensor deviation, int64_t seed, int64_t offset, Tensor out) {
  put(out, at::normal(mean, deviation, generator(seed, offset)));
})
OP(NormalTensorFloat, [](Tensor mean, float deviation, int64_t seed, int64_t offset, Tensor out) {
  put(out, at::normal(mean, deviation, generator(seed, offset)));
})
OP(NormalFloatTensor, [](float mean, Tensor deviation, int64_t seed, int64_t offset, Tensor out) {
  put(out, at::normal(mean, deviation, generator(seed, offset)));
})
OP(NormalFloatFloat, [](float mean, float deviation, int64_t seed, int64_t offset, Tensor out) {
  out.normal_(mean, deviation, generator(seed, offset));
})
OP(Randperm, [](int64_t count, int64_t seed, int64_t offset, Tensor out) {
  put(out, at::randperm(count, generator(seed, offset), out.options()));
})
OP(Multinomial, [](Tensor self, int64_t samples, bool replacement, int64_t seed, int64_t offset, Tensor out) {
  put(out, at::multinomial(self, samples, replacement, generator(seed, offset)));
})
OP(DropoutGenMaskV2, [](Ints shape, double p, int64_t seed, int64_t offset, DType, Tensor out) {
  put_dropout_mask(shape, p, generator(seed, offset), out);
})
OP(DropoutDoMask, [](Tensor self, Tensor mask, double p, Tensor out) {
  const auto kept = unpacked_bits(mask, self.numel()).view(self.sizes());
  put(out, at::where(kept, p < 1 ? self / (1 - p) : at::zeros_like(self), at::zeros({}, self.options())));
})

#if NPU_EMULATOR_CANN_9
// The generator of a captured graph: seed and offset lie on the device, and torch_npu writes them before each replay.
// `drawn` counts the numbers that the graph has drawn before.
namespace {

at::Generator generator_of_graph(const Tensor& seed, const Tensor& offset, uint64_t drawn) {
  return generator(seed.item<int64_t>(), offset.item<int64_t>() + drawn);
}

}  // namespace

OP(InplaceNormalTensor, [](Tensor self, float mean, float deviation, Tensor seed, Tensor offset, uint64_t drawn) {
  self.normal_(mean, deviation, generator_of_graph(seed, offset, drawn));
})
OP(InplaceUniformTensor, [](Tensor self, double low, double high, Tensor seed, Tensor offset, uint64_t drawn) {
  self.uniform_(low, high, generator_of_graph(seed, offset, drawn));
})
OP(InplaceRandomTensor, [](Tensor self, int64_t low, int64_t high, Tensor seed, Tensor offset, uint64_t drawn) {
  self.random_(low, high, generator_of_graph(seed, offset, drawn));
})
OP(InplaceRandomWithoutFromTo, [](Tensor self, uint64_t seed, uint64_t offset) {
  self.random_(generator(seed, offset));
})
OP(InplaceRandomWithoutFromToTensor, [](Tensor self, Tensor seed, Tensor offset, uint64_t drawn) {
  self.random_(generator_of_graph(seed, offset, drawn));
})
OP(MultinomialTensor, [](Tensor self, int64_t samples, bool replacement, Tensor seed, Tensor offset, uint64_t drawn,
                         Tensor out) {
  put(out, at::multinomial(self, samples, replacement, generator_of_graph(seed, offset, drawn)));
})
OP(DropoutGenMaskV2Tensor, [](Ints shape, double p, Tensor seed, Tensor offset, uint64_t drawn, DType, Tensor out) {
  put_dropout_mask(shape, p, generator_of_graph(seed, offset, drawn), out);
})
#endif
