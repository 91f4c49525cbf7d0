// Products of whole numbers, with and without groups.
#pragma once
#include "operators.h"

namespace cann {

// An operand of a product: numbers of 8 bits, or of 4 bits that are packed along the dimension whose elements adjoin.
Tensor whole_operand(const Tensor& given);

// Products of whole numbers, summed exactly, with their scales: one or one of each column, and one of each row. A bias of
// whole numbers belongs to the sum, another to the result.
void quant_matmul(const Tensor& self, const Tensor& other, const Tensor& scale, const Tensor& offset,
                  const Tensor& of_rows, const Tensor& bias, const Tensor& out);

}  // namespace cann
