// How tensors lie in memory: in plain order, in tiles (NZ), or with channels in blocks (NC1HWC0).
#pragma once
#include "operators.h"

namespace cann {

// Whether memory in this format is read in plain order.
bool is_plain(aclFormat format);

// Of tiles [..., n1, m1, m0, n0] the matrices [..., rows, columns]; and the other way, with zeros where tiles are larger.
Tensor from_tiles(const Tensor& tiles, int64_t rows, int64_t columns);
void to_tiles(const Tensor& matrix, const Tensor& tiles);

// Of blocks [n, c1, h, w, c0] the tensor of a shape, whose elements in order are [n, c, h, w]; and the other way, with zeros
// where there are more channels in the blocks. A vector is all channels, and a matrix [c, h].
Tensor from_channel_blocks(const Tensor& blocks, at::IntArrayRef shape);
void to_channel_blocks(const Tensor& tensor, const Tensor& blocks);

}  // namespace cann
