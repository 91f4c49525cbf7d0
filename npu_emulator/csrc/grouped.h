// Products of groups of rows.
#pragma once
#include "operators.h"

namespace cann {

// For each group of rows of self [rows, m] and weight [rows, n] adds their product, self turned, to a float32 total of
// groups * m * n elements. The list has running totals of rows.
void add_products_of_groups(const Tensor& self, const Tensor& weight, const Tensor& list, const Tensor& total);

}  // namespace cann
