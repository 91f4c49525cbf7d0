// Operators on two tensors, or on a tensor and a scalar.
#include "operators.h"

using namespace cann;

namespace {

// `mode`: 0 for true division, 1 to round toward zero, 2 toward minus infinity.
template <class Divisor>
Tensor divided(const Tensor& self, const Divisor& other, int mode) {
  if (mode == 0) return at::div(self, other);
  return at::div(self, other, c10::string_view(mode == 1 ? "trunc" : "floor"));
}

// Unlike torch, CANN divides integers in place and truncates the quotient: aclnn_div.cpp of ops-math only asks whether the
// type of the tensor can be cast to itself. torch_npu averages integers over ranks that way.
void put_quotient_back(const Tensor& self, const Tensor& quotient) {
  if (at::isIntegralType(self.scalar_type(), false)) put(self, quotient);
  else put_back(self, quotient);
}

}  // namespace

#define OF_TENSORS(NAME, FUNCTION) \
  OP(NAME, [](Tensor self, Tensor other, Tensor out) { put(out, FUNCTION(self, other)); })
#define OF_SCALAR(NAME, FUNCTION) \
  OP(NAME, [](Tensor self, Scalar other, Tensor out) { put(out, FUNCTION(self, other)); })
#define OF_TENSORS_IN_PLACE(NAME, FUNCTION) \
  OF_TENSORS(NAME, FUNCTION)                \
  CHECKED_OP(Inplace##NAME, [](Tensor self, Tensor other) { put_back(self, FUNCTION(self, other)); })
#define OF_SCALAR_IN_PLACE(NAME, FUNCTION) \
  OF_SCALAR(NAME, FUNCTION)                \
  CHECKED_OP(Inplace##NAME, [](Tensor self, Scalar other) { put_back(self, FUNCTION(self, other)); })

OF_TENSORS_IN_PLACE(Atan2, at::atan2)
OF_TENSORS_IN_PLACE(BitwiseAndTensor, at::bitwise_and)
OF_SCALAR_IN_PLACE(BitwiseAndScalar, at::bitwise_and)
OF_TENSORS_IN_PLACE(BitwiseOrTensor, at::bitwise_or)
OF_SCALAR_IN_PLACE(BitwiseOrScalar, at::bitwise_or)
OF_TENSORS_IN_PLACE(BitwiseXorTensor, at::bitwise_xor)
OF_SCALAR_IN_PLACE(BitwiseXorScalar, at::bitwise_xor)
OF_TENSORS(Div, at::div)
OF_SCALAR(Divs, at::div)
CHECKED_OP(InplaceDiv, [](Tensor self, Tensor other) { put_quotient_back(self, at::div(self, other)); })
CHECKED_OP(InplaceDivs, [](Tensor self, Scalar other) { put_quotient_back(self, at::div(self, other)); })
OF_TENSORS_IN_PLACE(EqTensor, at::eq)
OF_SCALAR_IN_PLACE(EqScalar, at::eq)
OF_TENSORS_IN_PLACE(FloorDivide, at::floor_divide)
OF_SCALAR_IN_PLACE(FloorDivides, at::floor_divide)
OF_TENSORS_IN_PLACE(FmodTensor, at::fmod)
OF_SCALAR_IN_PLACE(FmodScalar, at::fmod)
OF_TENSORS_IN_PLACE(GeTensor, at::ge)
OF_SCALAR_IN_PLACE(GeScalar, at::ge)
OF_TENSORS_IN_PLACE(GtTensor, at::gt)
OF_SCALAR_IN_PLACE(GtScalar, at::gt)
OF_TENSORS_IN_PLACE(LeTensor, at::le)
OF_SCALAR_IN_PLACE(LeScalar, at::le)
OF_TENSORS_IN_PLACE(LtTensor, at::lt)
OF_SCALAR_IN_PLACE(LtScalar, at::lt)
OF_TENSORS_IN_PLACE(NeTensor, at::ne)
OF_SCALAR_IN_PLACE(NeScalar, at::ne)
OF_TENSORS_IN_PLACE(LogicalAnd, at::logical_and)
OF_TENSORS_IN_PLACE(LogicalOr, at::logical_or)
OF_TENSORS(LogicalXor, at::logical_xor)
OF_TENSORS(LogAddExp, at::logaddexp)
OF_TENSORS(LogAddExp2, at::logaddexp2)
OF_TENSORS(Maximum, at::maximum)
OF_TENSORS(Minimum, at::minimum)
OF_TENSORS_IN_PLACE(Mul, at::mul)
OF_SCALAR_IN_PLACE(Muls, at::mul)
OF_TENSORS_IN_PLACE(PowTensorTensor, at::pow)
OF_SCALAR_IN_PLACE(PowTensorScalar, at::pow)
OF_TENSORS_IN_PLACE(RemainderTensorTensor, at::remainder)
OF_SCALAR_IN_PLACE(RemainderTensorScalar, at::remainder)
OP(PowScalarTensor, [](Scalar self, Tensor exponent, Tensor out) { put(out, at::pow(self, exponent)); })
OP(RemainderScalarTensor, [](Scalar self, Tensor other, Tensor out) { put(out, at::remainder(self, other)); })

OP(Add, [](Tensor self, Tensor other, Scalar alpha, Tensor out) { put(out, at::add(self, other, alpha)); })
OP(Adds, [](Tensor self, Scalar other, Scalar alpha, Tensor out) { put(out, at::add(self, other, alpha)); })
OP(AddV3, [](Scalar self, Tensor other, Scalar alpha, Tensor out) { put(out, at::mul(other, alpha).add(self)); })
CHECKED_OP(InplaceAdd, [](Tensor self, Tensor other, Scalar alpha) { self.add_(other, alpha); })
CHECKED_OP(InplaceAdds, [](Tensor self, Scalar other, Scalar alpha) { self.add_(other, alpha); })
OP(Sub, [](Tensor self, Tensor other, Scalar alpha, Tensor out) { put(out, at::sub(self, other, alpha)); })
OP(Subs, [](Tensor self, Scalar other, Scalar alpha, Tensor out) { put(out, at::sub(self, other, alpha)); })
CHECKED_OP(InplaceSub, [](Tensor self, Tensor other, Scalar alpha) { self.sub_(other, alpha); })
CHECKED_OP(InplaceSubs, [](Tensor self, Scalar other, Scalar alpha) { self.sub_(other, alpha); })
OP(Rsub, [](Tensor self, Tensor other, Scalar alpha, Tensor out) { put(out, at::rsub(self, other, alpha)); })
OP(Rsubs, [](Tensor self, Scalar other, Scalar alpha, Tensor out) { put(out, at::rsub(self, other, alpha)); })
OP(DivMod, [](Tensor self, Tensor other, int mode, Tensor out) { put(out, divided(self, other, mode)); })
OP(DivMods, [](Tensor self, Scalar other, int mode, Tensor out) { put(out, divided(self, other, mode)); })
OP(InplaceDivMod, [](Tensor self, Tensor other, int mode) { put(self, divided(self, other, mode)); })
OP(InplaceDivMods, [](Tensor self, Scalar other, int mode) { put(self, divided(self, other, mode)); })

OP(Equal, [](Tensor self, Tensor other, Tensor out) { out.fill_(at::equal(self, other)); })
OP(IsClose, [](Tensor self, Tensor other, double relative, double absolute, bool equal_nan, Tensor out) {
  put(out, at::isclose(self, other, relative, absolute, equal_nan));
})
OP(SWhere, [](Tensor condition, Tensor self, Tensor other, Tensor out) { put(out, at::where(condition, self, other)); })
OP(Clamp, [](Tensor self, MaybeScalar low, MaybeScalar high, Tensor out) { put(out, at::clamp(self, low, high)); })
OP(ClampTensor, [](Tensor self, Tensor low, Tensor high, Tensor out) {
  put(out, at::clamp(self, maybe(low), maybe(high)));
})
OP(ClampMin, [](Tensor self, Scalar low, Tensor out) { put(out, at::clamp_min(self, low)); })
OP(ClampMax, [](Tensor self, Scalar high, Tensor out) { put(out, at::clamp_max(self, high)); })
OP(ClampMinTensor, [](Tensor self, Tensor low, Tensor out) { put(out, at::clamp_min(self, low)); })
OP(ClampMaxTensor, [](Tensor self, Tensor high, Tensor out) { put(out, at::clamp_max(self, high)); })
OP(InplaceClampMax, [](Tensor self, Scalar high) { self.clamp_max_(high); })
OP(InplaceClampMinTensor, [](Tensor self, Tensor low) { put(self, at::clamp_min(self, low)); })
OP(InplaceClampMaxTensor, [](Tensor self, Tensor high) { put(self, at::clamp_max(self, high)); })
OP(Addcmul, [](Tensor self, Tensor a, Tensor b, Scalar value, Tensor out) { put(out, at::addcmul(self, a, b, value)); })
OP(Addcdiv, [](Tensor self, Tensor a, Tensor b, Scalar value, Tensor out) { put(out, at::addcdiv(self, a, b, value)); })
OP(InplaceAddcmul, [](Tensor self, Tensor a, Tensor b, Scalar value) { self.addcmul_(a, b, value); })
OP(InplaceAddcdiv, [](Tensor self, Tensor a, Tensor b, Scalar value) { self.addcdiv_(a, b, value); })
OP(Lerp, [](Tensor self, Tensor end, Tensor weight, Tensor out) { put(out, at::lerp(self, end, weight)); })
OP(Lerps, [](Tensor self, Tensor end, Scalar weight, Tensor out) { put(out, at::lerp(self, end, weight)); })
OP(InplaceLerp, [](Tensor self, Tensor end, Tensor weight) { self.lerp_(end, weight); })
OP(InplaceLerps, [](Tensor self, Tensor end, Scalar weight) { self.lerp_(end, weight); })
OP(InplaceMaskedFillScalar, [](Tensor self, Tensor mask, Scalar value) { self.masked_fill_(mask, value); })
OP(InplaceMaskedFillTensor, [](Tensor self, Tensor mask, Tensor value) {
  self.masked_fill_(mask, value.reshape({}));
})
OP(IsInTensorScalar, [](Tensor elements, Scalar test, bool unique, bool invert, Tensor out) {
  put(out, at::isin(elements, test, unique, invert));
})
OP(IsInScalarTensor, [](Scalar element, Tensor tests, bool unique, bool invert, Tensor out) {
  put(out, at::isin(element, tests, unique, invert));
})

// ---- products of matrices; the last argument says how far precision may be lowered, which the host does not
OP(Mm, [](Tensor self, Tensor other, Tensor out, int8_t) { put(out, at::mm(operand(self), operand(other))); })
OP(Matmul, [](Tensor self, Tensor other, Tensor out, int8_t) { put(out, at::matmul(operand(self), operand(other))); })
OP(BatchMatMul, [](Tensor self, Tensor other, Tensor out, int8_t) {
  put(out, at::matmul(operand(self), operand(other)));
})
OP(Mv, [](Tensor self, Tensor vector, Tensor out, int8_t) { put(out, at::mv(operand(self), operand(vector))); })
OP(Dot, [](Tensor self, Tensor other, Tensor out) { put(out, at::dot(operand(self), operand(other))); })
OP(Addmm, [](Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t) {
  put(out, at::addmm(operand(self), operand(a), operand(b), beta, alpha));
})
OP(InplaceAddmm, [](Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, int8_t) {
  put(self, at::addmm(operand(self), operand(a), operand(b), beta, alpha));
})
OP(Addmv, [](Tensor self, Tensor a, Tensor b, Scalar alpha, Scalar beta, Tensor out, int8_t) {
  put(out, at::addmv(operand(self), operand(a), operand(b), beta, alpha));
})
OP(Baddbmm, [](Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t) {
  put(out, at::baddbmm(operand(self), operand(a), operand(b), beta, alpha));
})
OP(Addbmm, [](Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t) {
  put(out, at::addbmm(operand(self), operand(a), operand(b), beta, alpha));
})
OP(Addr, [](Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out) {
  put(out, at::addr(operand(self), operand(a), operand(b), beta, alpha));
})
OP(LinalgCross, [](Tensor self, Tensor other, int64_t dim, Tensor out) {
  put(out, at::linalg_cross(operand(self), operand(other), dim));
})
OP(XLogYTensor, [](Tensor self, Tensor other, Tensor out) { put(out, at::xlogy(self, other)); })
OP(Gcd, [](Tensor self, Tensor other, Tensor out) { put(out, at::gcd(self, other)); })
OP(Complex, [](Tensor real, Tensor imaginary, Tensor out) { put(out, at::complex(real, imaginary)); })
OP(Polar, [](Tensor length, Tensor angle, Tensor out) { put(out, at::polar(length, angle)); })
