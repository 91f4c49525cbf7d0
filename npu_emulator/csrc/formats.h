// How tensors lie in memory: in plain order, or in tiles (NZ).
#pragma once
#include "operators.h"

namespace cann {

// Whether memory in this format is read in plain order.
bool is_plain(aclFormat format);

// Of tiles [..., n1, m1, m0, n0] the matrices [..., rows, columns]; and the other way, with zeros where tiles are larger.
Tensor from_tiles(const Tensor& tiles, int64_t rows, int64_t columns);
void to_tiles(const Tensor& matrix, const Tensor& tiles);

}  // namespace cann
