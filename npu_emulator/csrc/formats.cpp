// The private format NZ (FRACTAL_NZ): a matrix in tiles, which are stored column of tiles by column of tiles. A matrix
// [m, n] lies in memory as [n1, m1, m0, n0], filled up with zeros, with m = m1 * m0 and n = n1 * n0. With tiles of 2 x 2
// (real ones are 16 x 16, or 16 x 32 bytes), in order of memory:
//
//     0 1 2 3        0 1 4 5, 8 9 . .  the left column of tiles
//     4 5 6 7   ->   2 3 6 7, a b . .  the right one
//     8 9 a b
#include "formats.h"

#include <algorithm>

namespace cann {

bool is_plain(aclFormat format) {
  switch (format) {
    case ACL_FORMAT_UNDEFINED:
    case ACL_FORMAT_ND:
    case ACL_FORMAT_NCHW:
    case ACL_FORMAT_NHWC:
    case ACL_FORMAT_NCDHW:
    case ACL_FORMAT_NDHWC:
    case ACL_FORMAT_NCL: return true;
    default: return false;
  }
}

bool is_known(aclFormat format) {
  return is_plain(format) || format == ACL_FORMAT_FRACTAL_NZ || format == ACL_FORMAT_NC1HWC0 ||
         format == ACL_FORMAT_FRACTAL_Z;
}

Tensor from_tiles(const Tensor& tiles, int64_t rows, int64_t columns) {
  TORCH_CHECK(tiles.dim() >= 4, "a tensor in NZ has tiles, and its memory has the shape ", tiles.sizes());
  const auto matrix = tiles.transpose(-4, -3).transpose(-3, -2).flatten(-4, -3).flatten(-2, -1);
  return matrix.narrow(-2, 0, rows).narrow(-1, 0, columns);
}

void to_tiles(const Tensor& matrix, const Tensor& tiles) {
  tiles.zero_();
  const auto tile_rows = tiles.size(-2), tile_columns = tiles.size(-1);
  const auto filled = at::constant_pad_nd(matrix, {0, tiles.size(-4) * tile_columns - matrix.size(-1), 0,
                                                   tiles.size(-3) * tile_rows - matrix.size(-2)});
  tiles.copy_(filled.unflatten(-1, {-1, tile_columns}).unflatten(-3, {-1, tile_rows}).transpose(-3, -2)
                  .transpose(-4, -3));
}

namespace {

// As torch_npu counts dimensions: a vector is all channels, a matrix [c, h].
Ints with_channels(at::IntArrayRef shape) {
  TORCH_CHECK(shape.size() <= 4, "a tensor of shape ", shape, " has no channels in blocks");
  Ints whole{1, 1, 1, 1};
  std::copy(shape.begin(), shape.end(), whole.begin() + (shape.size() < 4));
  return whole;
}
// Memory of either format as [n, c, h, w], with as many rows and channels as there is room for. NC1HWC0 is
// [n, c1, h, w, c0], FRACTAL_Z is [c1 * h * w, n1, n0, c0].
Tensor in_order(const Tensor& memory, aclFormat format, const Ints& shape) {
  if (format == ACL_FORMAT_NC1HWC0) return memory.permute({0, 1, 4, 2, 3}).flatten(1, 2);
  return memory.unflatten(0, {-1, shape[2], shape[3]}).permute({3, 4, 0, 5, 1, 2}).flatten(2, 3).flatten(0, 1);
}
void demand_blocks(const Tensor& memory, aclFormat format) {
  TORCH_CHECK(format == ACL_FORMAT_NC1HWC0 || format == ACL_FORMAT_FRACTAL_Z, "private format ",
              static_cast<int>(format), " is not emulated");
  TORCH_CHECK(memory.dim() == (format == ACL_FORMAT_NC1HWC0 ? 5 : 4), "memory with channels in blocks has the shape ",
              memory.sizes());
}

}  // namespace

Tensor from_memory(const Tensor& memory, aclFormat format, at::IntArrayRef shape) {
  if (!c10::multiply_integers(shape)) return at::empty(shape, memory.options());
  if (format == ACL_FORMAT_FRACTAL_NZ) {
    const int64_t rows = shape.size() < 2 ? c10::multiply_integers(shape) : shape[shape.size() - 2];
    return from_tiles(memory, rows, shape.size() < 2 ? 1 : shape.back()).reshape(shape);
  }
  demand_blocks(memory, format);
  const auto whole = with_channels(shape);
  return in_order(memory, format, whole).narrow(0, 0, whole[0]).narrow(1, 0, whole[1]).reshape(shape);
}

void to_memory(const Tensor& tensor, const Tensor& memory, aclFormat format) {
  if (format == ACL_FORMAT_FRACTAL_NZ) return to_tiles(tensor.dim() < 2 ? tensor.reshape({-1, 1}) : tensor, memory);
  demand_blocks(memory, format);
  memory.zero_();
  if (!tensor.numel()) return;
  const auto whole = with_channels(tensor.sizes());
  const auto room = in_order(memory, format, whole);
  const auto rows = at::constant_pad_nd(
      tensor.reshape(whole), {0, 0, 0, 0, 0, room.size(1) - whole[1], 0, room.size(0) - whole[0]});
  if (format == ACL_FORMAT_NC1HWC0) {
    memory.copy_(rows.unflatten(1, {memory.size(1), memory.size(4)}).permute({0, 1, 3, 4, 2}));
    return;
  }
  const auto blocks = rows.unflatten(1, {-1, memory.size(3)}).unflatten(0, {memory.size(1), memory.size(2)});
  memory.copy_(blocks.permute({2, 4, 5, 0, 1, 3}).reshape(memory.sizes()));
}

Tensor plain_copy(const aclTensor& tensor) {
  TORCH_CHECK(tensor.format == ACL_FORMAT_FRACTAL_NZ, "private format ", static_cast<int>(tensor.format),
              " is not emulated");
  TORCH_CHECK(tensor.offset == 0 && tensor.dims.size() >= 2, "a part of a tensor in NZ cannot be read");
  const size_t last = tensor.dims.size() - 1;
  const bool is_transposed = tensor.strides[last - 1] == 1 && tensor.strides[last] != 1;
  auto rows = tensor.dims[last - 1], columns = tensor.dims[last];
  if (is_transposed) std::swap(rows, columns);
  const auto tiles =
      at::from_blob(tensor.data, tensor.storage, at::TensorOptions().dtype(scalar_type(tensor.dtype)));
  const auto matrix = from_tiles(tiles, rows, columns);
  return (is_transposed ? matrix.transpose(-1, -2) : matrix).reshape(tensor.dims);
}

}  // namespace cann
