// Reductions, sorting, counting.
#include "operators.h"

using namespace cann;

namespace {

// The type in which a result of `dtype` is computed: float32 for 16 bits.
at::ScalarType summed(DType dtype) {
  const auto type = at::ScalarType(dtype);
  return at::isReducedFloatingType(type) ? at::kFloat : type;
}

}  // namespace

OP(ReduceSum, [](Tensor self, Ints dims, bool keep, DType dtype, Tensor out) {
  put(out, at::sum(self, dims, keep, at::ScalarType(dtype)));
})
OP(Mean, [](Tensor self, Ints dims, bool keep, DType dtype, Tensor out) {
  put(out, at::mean(self, dims, keep, at::ScalarType(dtype)));
})
OP(Max, [](Tensor self, Tensor out) { put(out, at::max(self)); })
OP(Min, [](Tensor self, Tensor out) { put(out, at::min(self)); })
OP(MaxDim, [](Tensor self, int64_t dim, bool keep, Tensor values, Tensor indices) {
  const auto [most, at_index] = at::max(self, dim, keep);
  put(values, most);
  put(indices, at_index);
})
OP(MinDim, [](Tensor self, int64_t dim, bool keep, Tensor values, Tensor indices) {
  const auto [least, at_index] = at::min(self, dim, keep);
  put(values, least);
  put(indices, at_index);
})
OP(Aminmax, [](Tensor self, Ints dims, bool keep, Tensor least, Tensor most) {
  put(least, at::amin(self, dims, keep));
  put(most, at::amax(self, dims, keep));
})
OP(Amax, [](Tensor self, Ints dims, bool keep, Tensor out) { put(out, at::amax(self, dims, keep)); })
OP(Amin, [](Tensor self, Ints dims, bool keep, Tensor out) { put(out, at::amin(self, dims, keep)); })
OP(ArgMax, [](Tensor self, int64_t dim, bool keep, Tensor out) { put(out, at::argmax(self, dim, keep)); })
OP(ArgMin, [](Tensor self, int64_t dim, bool keep, Tensor out) { put(out, at::argmin(self, dim, keep)); })
OP(All, [](Tensor self, Ints dims, bool keep, Tensor out) {
  put(out, at::all(self, at::OptionalIntArrayRef(dims), keep));
})
OP(Any, [](Tensor self, Ints dims, bool keep, Tensor out) {
  put(out, at::any(self, at::OptionalIntArrayRef(dims), keep));
})
OP(Prod, [](Tensor self, DType dtype, Tensor out) { put(out, at::prod(operand(self), summed(dtype))); })
OP(ProdDim, [](Tensor self, int64_t dim, bool keep, DType dtype, Tensor out) {
  put(out, at::prod(operand(self), dim, keep, summed(dtype)));
})
OP(Norm, [](Tensor self, Scalar p, Ints dims, bool keep, Tensor out) { put(out, at::norm(self, p, dims, keep)); })
OP(LinalgVectorNorm, [](Tensor self, Scalar p, Ints dims, bool keep, DType dtype, Tensor out) {
  put(out, at::linalg_vector_norm(self, p, dims, keep, at::ScalarType(dtype)));
})
OP(VarCorrection, [](Tensor self, Ints dims, int64_t correction, bool keep, Tensor out) {
  put(out, at::var(operand(self), at::OptionalIntArrayRef(dims), Scalar(correction), keep));
})
OP(VarMean, [](Tensor self, Ints dims, int64_t correction, bool keep, Tensor var, Tensor mean) {
  const auto [of_var, of_mean] = at::var_mean(operand(self), at::OptionalIntArrayRef(dims), Scalar(correction), keep);
  put(var, of_var);
  put(mean, of_mean);
})
OP(ReduceNansum, [](Tensor self, Ints dims, bool keep, DType dtype, Tensor out) {
  put(out, at::nansum(self, dims, keep, at::ScalarType(dtype)));
})
OP(Trace, [](Tensor self, Tensor out) { put(out, at::trace(self)); })
OP(Median, [](Tensor self, Tensor out) { put(out, at::median(self)); })
OP(NanMedian, [](Tensor self, Tensor out) { put(out, at::nanmedian(self)); })
OP(Kthvalue, [](Tensor self, int64_t k, int64_t dim, bool keep, Tensor values, Tensor indices) {
  const auto [found, at_place] = at::kthvalue(self, k, dim, keep);
  put(values, found);
  put(indices, at_place);
})
OP(MedianDim, [](Tensor self, int64_t dim, bool keep, Tensor values, Tensor indices) {
  const auto [found, at_place] = at::median(self, dim, keep);
  put(values, found);
  put(indices, at_place);
})
OP(NanMedianDim, [](Tensor self, int64_t dim, bool keep, Tensor values, Tensor indices) {
  const auto [found, at_place] = at::nanmedian(self, dim, keep);
  put(values, found);
  put(indices, at_place);
})
OP(StdMeanCorrection, [](Tensor self, Ints dims, int64_t correction, bool keep, Tensor deviation, Tensor mean) {
  const auto [of_std, of_mean] = at::std_mean(operand(self), at::OptionalIntArrayRef(dims), Scalar(correction), keep);
  put(deviation, of_std);
  put(mean, of_mean);
})
OP(Std, [](Tensor self, Ints dims, int64_t correction, bool keep, Tensor out) {
  put(out, at::std(operand(self), at::OptionalIntArrayRef(dims), Scalar(correction), keep));
})
OP(LogSumExp, [](Tensor self, Ints dims, bool keep, Tensor out) { put(out, at::logsumexp(operand(self), dims, keep)); })
OP(Cumsum, [](Tensor self, int64_t dim, DType dtype, Tensor out) {
  put(out, self.cumsum(dim, at::ScalarType(dtype)));
})
OP(Cumprod, [](Tensor self, Scalar dim, DType dtype, Tensor out) {
  put(out, self.cumprod(dim.toLong(), at::ScalarType(dtype)));
})
OP(Cummax, [](Tensor self, int64_t dim, Tensor values, Tensor indices) {
  const auto [most, at_index] = at::cummax(self, dim);
  put(values, most);
  put(indices, at_index);
})
OP(Cummin, [](Tensor self, int64_t dim, Tensor values, Tensor indices) {
  const auto [least, at_index] = at::cummin(self, dim);
  put(values, least);
  put(indices, at_index);
})
OP(Bincount, [](Tensor self, Tensor weights, int64_t least, Tensor out) {
  put(out, at::bincount(self, maybe(weights), least));
})
OP(Histc, [](Tensor self, int64_t bins, Scalar low, Scalar high, Tensor out) {
  put(out, at::histc(wide(self), bins, low, high));
})
OP(Topk, [](Tensor self, int64_t k, int64_t dim, bool largest, bool sorted, Tensor values, Tensor indices) {
  const auto [best, at_index] = at::topk(self, k, dim, largest, sorted);
  put(values, best);
  put(indices, at_index);
})
// The device sorts stably whether or not it is asked to.
OP(Sort, [](Tensor self, bool, int64_t dim, bool descending, Tensor values, Tensor indices) {
  const auto [sorted, order] = at::sort(self, std::optional<bool>(true), dim, descending);
  put(values, sorted);
  put(indices, order);
})
OP(Unique, [](Tensor self, bool sorted, bool inverted, Dynamic values, Tensor inverse) {
  const auto [unique, where] = at::_unique(self, sorted, true);
  values.fill(unique);
  if (inverted) put(inverse, where);
})
// Outputs that are not asked for have no memory.
OP(Unique2, [](Tensor self, bool sorted, bool inverted, bool counted, Dynamic values, Dynamic inverse,
               Dynamic counts) {
  const auto [unique, where, how_often] = at::_unique2(self, sorted, true, true);
  values.fill(unique);
  if (inverted || counted) inverse.fill(where.view(self.sizes()));
  if (counted) counts.fill(how_often);
})
OP(UniqueDim, [](Tensor self, bool sorted, bool inverted, int64_t dim, Dynamic values, Dynamic inverse,
                 Dynamic counts) {
  const auto [unique, where, how_often] = at::unique_dim(self, dim, sorted, true, true);
  values.fill(unique);
  if (inverted) inverse.fill(where);
  counts.fill(how_often);
})
OP(UniqueConsecutive, [](Tensor self, bool inverted, bool counted, int64_t dim, Dynamic values, Dynamic inverse,
                         Dynamic counts) {
  constexpr int64_t kFlat = 1000;  // op-plugin's way to say that no dimension was given
  const auto along = dim == kFlat ? std::nullopt : std::optional<int64_t>(dim);
  const auto [unique, where, how_often] = at::unique_consecutive(self, true, true, along);
  values.fill(unique);
  if (inverted) inverse.fill(where);
  if (counted) counts.fill(how_often);
})
