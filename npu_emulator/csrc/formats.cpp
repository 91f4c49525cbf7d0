// The private format NZ (FRACTAL_NZ): a matrix in tiles, which are stored column of tiles by column of tiles. A matrix
// [m, n] lies in memory as [n1, m1, m0, n0], filled up with zeros, with m = m1 * m0 and n = n1 * n0. With tiles of 2 x 2
// (real ones are 16 x 16, or 16 x 32 bytes), in order of memory:
//
//     0 1 2 3        0 1 4 5, 8 9 . .  the left column of tiles
//     4 5 6 7   ->   2 3 6 7, a b . .  the right one
//     8 9 a b
#include "formats.h"

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

Tensor from_channel_blocks(const Tensor& blocks, at::IntArrayRef shape) {
  TORCH_CHECK(blocks.dim() == 5, "a tensor in NC1HWC0 has memory of the shape ", blocks.sizes());
  const auto channels = quotient(c10::multiply_integers(shape), blocks.size(0) * blocks.size(2) * blocks.size(3));
  return blocks.permute({0, 1, 4, 2, 3}).flatten(1, 2).narrow(1, 0, channels).reshape(shape);
}

void to_channel_blocks(const Tensor& tensor, const Tensor& blocks) {
  TORCH_CHECK(blocks.dim() == 5, "a tensor in NC1HWC0 has memory of the shape ", blocks.sizes());
  const auto rows = blocks.size(2), columns = blocks.size(3);
  const auto channels = quotient(tensor.numel(), blocks.size(0) * rows * columns);
  const auto filled = at::constant_pad_nd(tensor.reshape({blocks.size(0), channels, rows, columns}),
                                          {0, 0, 0, 0, 0, blocks.size(1) * blocks.size(4) - channels});
  blocks.copy_(filled.unflatten(1, {blocks.size(1), blocks.size(4)}).permute({0, 1, 3, 4, 2}));
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
