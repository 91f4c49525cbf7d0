// How tensors lie in memory: in plain order, in tiles (NZ), or with channels in blocks (NC1HWC0, FRACTAL_Z).
#pragma once
#include "operators.h"

namespace cann {

// Whether memory in this format is read in plain order.
bool is_plain(aclFormat format);
// Whether it is read at all.
bool is_known(aclFormat format);

// Converts tiles [..., n1, m1, m0, n0] to matrices [..., rows, columns], and back, with zeros where tiles are larger.
Tensor from_tiles(const Tensor& tiles, int64_t rows, int64_t columns);
void to_tiles(const Tensor& matrix, const Tensor& tiles);

// Reads memory in a private format as a tensor of a shape, and writes it back, with zeros where memory is larger.
// Throws for a format that is not known.
Tensor from_memory(const Tensor& memory, aclFormat format, at::IntArrayRef shape);
void to_memory(const Tensor& tensor, const Tensor& memory, aclFormat format);

}  // namespace cann
