// Attention on tensors with heads first, [batch, heads, sequence, size], in float32: what the operators for training and
// those for inference share.
#pragma once
#include "operators.h"

namespace cann {

// Checks the mask as every attention operator does: causal rules and bands take one compressed mask, a triangle.
void demand_mask(int64_t sparse_mode, const Tensor& mask);
// Writes the attention to `out`, and the largest score and the sum of exponentials of each query, [batch, heads,
// queries], to `most` and `total`. `hidden` is undefined or broadcasts to [batch, heads, queries, keys], as `factors` are,
// which weights are multiplied with after the softmax. Several heads of queries may share one of keys.
void attend(const Tensor& query, const Tensor& key, const Tensor& value, double scale, const Tensor& hidden,
            const Tensor& most, const Tensor& total, const Tensor& out, const Tensor& factors = {});

}  // namespace cann
