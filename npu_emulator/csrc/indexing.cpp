// Operators that move elements: concatenation, indices, gathering and scattering, repetition.
#include <algorithm>

#include "operators.h"

using namespace cann;

namespace {

// A dimension without an index comes as a tensor of shape {0}. An index that picks nothing looks the same.
c10::List<std::optional<Tensor>> places(const Tensors& indices) {
  c10::List<std::optional<Tensor>> list;
  for (const auto& index : indices) {
    const bool given = index.defined() && index.sizes() != at::IntArrayRef{0};
    list.push_back(given ? std::optional<Tensor>(index) : std::nullopt);
  }
  return list;
}

enum Reduction : int64_t { kReplace = 0, kAdd = 1, kMultiply = 2 };

// CANN takes indices of 32 bits too, and ATen here those of 64 alone.
Tensor of_64_bits(const Tensor& index) { return index.to(at::kLong); }

Tensor scattered(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, int64_t reduction) {
  if (reduction == kReplace) return self.scatter(dim, index, source);
  return reduction == kAdd ? self.scatter_add(dim, index, source) : self.scatter(dim, index, source, "multiply");
}

Tensor scattered(const Tensor& self, int64_t dim, const Tensor& index, const Scalar& value, int64_t reduction) {
  if (reduction == kReplace) return self.scatter(dim, index, value);
  return self.scatter(dim, index, value, reduction == kAdd ? "add" : "multiply");
}

}  // namespace

OP(Cat, [](Tensors tensors, int64_t dim, Tensor out) { put(out, at::cat(tensors, dim)); })
OP(Stack, [](Tensors tensors, int64_t dim, Tensor out) { put(out, at::stack(tensors, dim)); })
OP(Index, [](Tensor self, Tensors indices, Tensor out) {
  if (out.numel()) put(out, at::index(self, places(indices)));
})
OP(IndexPutImpl, [](Tensor self, Tensors indices, Tensor values, bool accumulate, bool) {
  const auto to = places(indices);
  bool any_given = false;
  for (const std::optional<Tensor> index : to) any_given |= index.has_value();
  if (any_given && values.numel()) self.index_put_(to, values, accumulate);
})
OP(IndexSelect, [](Tensor self, int64_t dim, Tensor index, Tensor out) {
  put(out, at::index_select(self, dim, index));
})
OP(IndexAdd, [](Tensor self, int64_t dim, Tensor index, Tensor source, Scalar alpha, Tensor out) {
  put(out, at::index_add(self, dim, index, source, alpha));
})
OP(IndexCopy, [](Tensor self, int64_t dim, Tensor index, Tensor source, Tensor out) {
  put(out, at::index_copy(self, dim, of_64_bits(index), source));
})
OP(InplaceIndexCopy, [](Tensor self, int64_t dim, Tensor index, Tensor source) {
  self.index_copy_(dim, of_64_bits(index), source);
})
#if NPU_EMULATOR_CANN_9
// For op-plugin of torch_npu 2.10 the index is a tensor.
OP(IndexFill, [](Tensor self, int64_t dim, Tensor index, Scalar value, Tensor out) {
  put(out, at::index_fill(self, dim, of_64_bits(index), value));
})
OP(InplaceIndexFill, [](Tensor self, int64_t dim, Tensor index, Scalar value) {
  self.index_fill_(dim, of_64_bits(index), value);
})
#endif
OP(IndexFillTensor, [](Tensor self, int64_t dim, Ints index, Scalar value, Tensor out) {
  put(out, at::index_fill(self, dim, at::tensor(index, at::kLong), value));
})
OP(InplaceIndexFillTensor, [](Tensor self, int64_t dim, Ints index, Scalar value) {
  self.index_fill_(dim, at::tensor(index, at::kLong), value);
})
OP(Gather, [](Tensor self, int64_t dim, Tensor index, Tensor out) { put(out, at::gather(self, dim, of_64_bits(index))); })
OP(Scatter, [](Tensor self, int64_t dim, Tensor index, Tensor source, int64_t reduction, Tensor out) {
  put(out, scattered(self, dim, of_64_bits(index), source, reduction));
})
OP(InplaceScatter, [](Tensor self, int64_t dim, Tensor index, Tensor source, int64_t reduction) {
  put(self, scattered(self, dim, of_64_bits(index), source, reduction));
})
OP(ScatterValue, [](Tensor self, int64_t dim, Tensor index, Scalar value, int64_t reduction, Tensor out) {
  put(out, scattered(self, dim, of_64_bits(index), value, reduction));
})
OP(InplaceScatterValue, [](Tensor self, int64_t dim, Tensor index, Scalar value, int64_t reduction) {
  put(self, scattered(self, dim, of_64_bits(index), value, reduction));
})
OP(ScatterAdd, [](Tensor self, int64_t dim, Tensor index, Tensor source, Tensor out) {
  put(out, at::scatter_add(self, dim, of_64_bits(index), source));
})
OP(InplacePut, [](Tensor self, Tensor index, Tensor source, bool accumulate) {
  self.put_(of_64_bits(index), source, accumulate);
})
OP(Take, [](Tensor self, Tensor index, Tensor out) { put(out, at::take(self, of_64_bits(index))); })
OP(MaskedSelect, [](Tensor self, Tensor mask, Dynamic out) { out.fill(at::masked_select(self, mask)); })
OP(InplaceMaskedScatter, [](Tensor self, Tensor mask, Tensor source) { self.masked_scatter_(mask, source); })
OP(Nonzero, [](Tensor self, Dynamic out) { out.fill(self.nonzero()); })
OP(NonzeroV2, [](Tensor self, Dynamic out) { out.fill(self.nonzero().t()); })
OP(Repeat, [](Tensor self, Ints counts, Tensor out) { put(out, self.repeat(counts)); })
OP(RepeatInterleave, [](Tensor self, Tensor counts, int64_t, Tensor out) {
  put(out, at::repeat_interleave(self, counts));
})
OP(RepeatInterleaveWithDim, [](Tensor self, Tensor counts, int64_t dim, int64_t, Tensor out) {
  put(out, at::repeat_interleave(self, counts, dim));
})
OP(RepeatInterleaveGrad, [](Tensor gradient, Tensor counts, int64_t dim, Tensor out) {
  const auto sums = at::zeros(out.sizes(), operand(gradient).options());
  put(out, sums.index_add(dim, at::repeat_interleave(counts.to(at::kLong)), operand(gradient)));
})
OP(RepeatInterleaveInt, [](Tensor self, int64_t count, int64_t, Tensor out) {
  put(out, at::repeat_interleave(self, count));
})
OP(RepeatInterleaveIntWithDim, [](Tensor self, int64_t count, int64_t dim, int64_t, Tensor out) {
  put(out, at::repeat_interleave(self, count, dim));
})
OP(Flip, [](Tensor self, Ints dims, Tensor out) { put(out, self.flip(dims)); })
OP(Roll, [](Tensor self, Ints shifts, Ints dims, Tensor out) { put(out, self.roll(shifts, dims)); })
OP(ConstantPadNd, [](Tensor self, Ints padding, Scalar value, Tensor out) {
  put(out, at::constant_pad_nd(self, padding, value));
})
OP(Embedding, [](Tensor weight, Tensor indices, Tensor out) { put(out, at::embedding(weight, indices)); })
OP(EmbeddingRenorm, [](Tensor self, Tensor indices, double largest_norm, double p) {
  TORCH_CHECK(self.dim() == 2, "a table of rows has ", self.dim(), " dimensions");
  auto rows = wide(self).clone();
  put(self, at::embedding_renorm_(rows, indices, largest_norm, p));
})
OP(EmbeddingDenseBackward,
   [](Tensor gradient, Tensor indices, uint64_t count, uint64_t padding, bool by_frequency, Tensor out) {
     put(out, at::embedding_dense_backward(gradient, indices, static_cast<int64_t>(count),
                                           static_cast<int64_t>(padding), by_frequency));
   })
// Outputs that are not computed on the way have no memory.
OP(EmbeddingBag, [](Tensor weight, Tensor indices, Tensor offsets, bool by_frequency, int64_t mode, bool sparse,
                    Tensor weights, bool last_offset, int64_t padding, Tensor out, Tensor bag_of_each, Tensor sizes,
                    Tensor most) {
  // ATen's kernel trusts its caller with all of these.
  TORCH_CHECK(weight.dim() == 2 && indices.dim() == 1 && offsets.dim() == 1, "weight, indices and offsets of shapes ",
              weight.sizes(), ", ", indices.sizes(), " and ", offsets.sizes());
  const auto starts = whole_numbers(offsets), rows = whole_numbers(indices);
  TORCH_CHECK(std::is_sorted(starts.begin(), starts.end()) && !starts.empty() && starts.front() == 0 &&
                  starts.back() <= indices.numel(),
              "offsets do not go up from 0 to at most ", indices.numel());
  TORCH_CHECK(std::all_of(rows.begin(), rows.end(), [&](auto row) { return row >= 0 && row < weight.size(0); }),
              "an index is not one of the ", weight.size(0), " rows");
  TORCH_CHECK(mode >= 0 && mode <= 2, "no such mode ", mode);
  if (weights.defined()) demand_same_shape(weights, indices);
  const auto [sums, bags, counts, at_index] = at::_embedding_bag(weight, indices, offsets, by_frequency, mode, sparse,
                                                                 maybe(weights), last_offset, padding);
  put(out, sums);
  if (bag_of_each.sizes() == bags.sizes()) put(bag_of_each, bags);
  if (sizes.sizes() == counts.sizes()) put(sizes, counts);
  if (most.sizes() == at_index.sizes()) put(most, at_index);
})
OP(OneHot, [](Tensor self, int64_t classes, Tensor on, Tensor off, int64_t, Tensor out) {
  const auto hot = at::one_hot(self.to(at::kLong), classes).to(at::kBool);
  put(out, at::where(hot, on, off).to(out.scalar_type()));
})
OP(SearchSorted, [](Tensor sorted, Tensor values, bool int32, bool right, Tensor sorter, Tensor out) {
  put(out, at::searchsorted(sorted, values, int32, right, std::nullopt, maybe(sorter)));
})
