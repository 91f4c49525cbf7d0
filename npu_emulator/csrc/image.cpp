// Convolutions, pools, padding, interpolation, and the norms over channels, with their gradients.
#include <algorithm>

#include "operators.h"

using namespace cann;

namespace {

std::array<bool, 3> three(const Bools& wanted) { return {wanted.at(0), wanted.at(1), wanted.at(2)}; }
// 0 says that the elements of a window are counted.
std::optional<int64_t> maybe_divisor(int64_t divisor) {
  return divisor ? std::optional<int64_t>(divisor) : std::nullopt;
}

// op-plugin writes 0, 1 or -1 for a factor that was not given. One that was given gives the size of the result.
std::optional<double> factor(double given, int64_t in, int64_t out) {
  const bool is_given = given > 0 && static_cast<int64_t>(given * static_cast<double>(in)) == out;
  return is_given ? std::optional<double>(given) : std::nullopt;
}
std::optional<double> factor(double given, const Ints& in, const Ints& out, int64_t from_last) {
  return factor(given, in.at(in.size() - from_last), out.at(out.size() - from_last));
}

// Elements of a gradient at the places in the last `dims` dimensions that were taken.
Tensor taken(const Tensor& gradient, const Tensor& indices, int64_t dims) {
  return gradient.flatten(-dims).gather(-1, indices.to(at::kLong).flatten(-dims)).view(indices.sizes());
}

}  // namespace

OP(Convolution, [](Tensor self, Tensor weight, Tensor bias, Ints stride, Ints padding, Ints dilation, bool transposed,
                   Ints output_padding, int64_t groups, Tensor out, int8_t) {
  put(out, at::convolution(operand(self), operand(weight), maybe(operand(bias)), stride, padding, dilation, transposed,
                           output_padding, groups));
})
OP(ConvolutionBackward,
   [](Tensor gradient, Tensor self, Tensor weight, Ints of_bias_sizes, Ints stride, Ints padding, Ints dilation,
      bool transposed, Ints output_padding, int64_t groups, Bools wanted, int8_t, Tensor of_self, Tensor of_weight,
      Tensor of_bias) {
     const auto mask = three(wanted);
     const auto [to_self, to_weight, to_bias] = at::convolution_backward(
         operand(gradient), operand(self), operand(weight), of_bias_sizes, stride, padding, dilation, transposed,
         output_padding, groups, mask);
     if (mask[0]) put(of_self, to_self);
     if (mask[1]) put(of_weight, to_weight);
     if (mask[2]) put(of_bias, to_bias);
   })
OP(Im2col, [](Tensor self, Ints kernel, Ints dilation, Ints padding, Ints stride, Tensor out) {
  put(out, at::im2col(self, kernel, dilation, padding, stride));
})
OP(Im2colBackward, [](Tensor gradient, Ints size, Ints kernel, Ints dilation, Ints padding, Ints stride, Tensor out) {
  put(out, at::col2im(gradient, size, kernel, dilation, padding, stride));
})
OP(ChannelShuffle, [](Tensor self, int64_t groups, Tensor out) { put(out, at::channel_shuffle(self, groups)); })

// One of few operators whose names begin otherwise.
CANN_FUNCTION(cann::Plain, cann::execute, aclStft,
              [](Tensor self, Tensor window, Tensor out, int64_t size, int64_t hop, int32_t window_size,
                 bool normalized, bool one_sided, bool is_complex) {
                const auto result =
                    at::stft(self, size, hop, window_size, maybe(window), normalized, one_sided, true);
                put(out, is_complex ? result : at::view_as_real(result));
              })

// ---- pools
namespace {

// For gradients whose kernels in ATen trust their caller: `given` must have the type of `self`, and its dimensions but
// for the last `free` ones.
void demand_leading(const Tensor& given, const Tensor& self, int64_t free) {
  TORCH_CHECK(given.scalar_type() == self.scalar_type(), "types ", given.scalar_type(), " and ", self.scalar_type());
  TORCH_CHECK(given.dim() == self.dim() && self.dim() >= free &&
                  given.sizes().slice(0, self.dim() - free) == self.sizes().slice(0, self.dim() - free),
              "shapes ", given.sizes(), " and ", self.sizes(), " differ before their last ", free, " dimensions");
}

}  // namespace

OP(AvgPool2d, [](Tensor self, Ints kernel, Ints stride, Ints padding, bool ceil, bool counts_padding, int64_t divisor,
                 int8_t, Tensor out) {
  put(out, at::avg_pool2d(self, kernel, stride, padding, ceil, counts_padding, maybe_divisor(divisor)));
})
OP(AvgPool2dBackward, [](Tensor gradient, Tensor self, Ints kernel, Ints stride, Ints padding, bool ceil,
                         bool counts_padding, int64_t divisor, int8_t, Tensor out) {
  put(out, at::avg_pool2d_backward(gradient, self, kernel, stride, padding, ceil, counts_padding,
                                   maybe_divisor(divisor)));
})
OP(AvgPool3d, [](Tensor self, Ints kernel, Ints stride, Ints padding, bool ceil, bool counts_padding, int64_t divisor,
                 Tensor out) {
  put(out, at::avg_pool3d(self, kernel, stride, padding, ceil, counts_padding, maybe_divisor(divisor)));
})
OP(AvgPool3dBackward, [](Tensor gradient, Tensor self, Ints kernel, Ints stride, Ints padding, bool ceil,
                         bool counts_padding, int64_t divisor, Tensor out) {
  put(out, at::avg_pool3d_backward(gradient, self, kernel, stride, padding, ceil, counts_padding,
                                   maybe_divisor(divisor)));
})
OP(AdaptiveAvgPool2d, [](Tensor self, Ints size, Tensor out) { put(out, at::_adaptive_avg_pool2d(self, size)); })
OP(AdaptiveAvgPool2dBackward, [](Tensor gradient, Tensor self, Tensor out) {
  demand_leading(gradient, self, 2);
  put(out, at::_adaptive_avg_pool2d_backward(gradient, self));
})
OP(AdaptiveAvgPool3d, [](Tensor self, Ints size, Tensor out) { put(out, at::_adaptive_avg_pool3d(operand(self), size)); })
OP(AdaptiveAvgPool3dBackward, [](Tensor gradient, Tensor self, Tensor out) {
  demand_leading(gradient, self, 3);
  put(out, at::_adaptive_avg_pool3d_backward(operand(gradient), operand(self)));
})
OP(AdaptiveMaxPool2d, [](Tensor self, Ints size, Tensor out, Tensor indices) {
  const auto [most, at_index] = at::adaptive_max_pool2d(self, size);
  put(out, most);
  put(indices, at_index);
})
OP(AdaptiveMaxPool2dBackward, [](Tensor gradient, Tensor self, Tensor indices, Tensor out) {
  demand_leading(gradient, self, 2);
  demand_same_shape(indices, gradient);
  put(out, at::adaptive_max_pool2d_backward(gradient, self, indices.to(at::kLong)));
})
OP(AdaptiveMaxPool3d, [](Tensor self, Ints size, Tensor out, Tensor indices) {
  const auto [most, at_index] = at::adaptive_max_pool3d(self, size);
  put(out, most);
  put(indices, at_index);
})
OP(AdaptiveMaxPool3dBackward, [](Tensor gradient, Tensor self, Tensor indices, Tensor out) {
  demand_leading(gradient, self, 3);
  demand_same_shape(indices, gradient);
  put(out, at::adaptive_max_pool3d_backward(gradient, self, indices.to(at::kLong)));
})
// The mask is the kernel's own, bits that only its gradient reads; here that finds the places again.
OP(MaxPool2dWithMask, [](Tensor self, Ints kernel, Ints stride, Ints padding, Ints dilation, bool ceil, Tensor out,
                         Tensor mask) {
  put(out, std::get<0>(at::max_pool2d_with_indices(self, kernel, stride, padding, dilation, ceil)));
  mask.zero_();
})
OP(MaxPool2dWithMaskBackward, [](Tensor gradient, Tensor self, Tensor, Ints kernel, Ints stride, Ints padding,
                                 Ints dilation, bool ceil, Tensor out) {
  const auto at_index = std::get<1>(at::max_pool2d_with_indices(self, kernel, stride, padding, dilation, ceil));
  put(out, at::max_pool2d_with_indices_backward(gradient, self, kernel, stride, padding, dilation, ceil, at_index));
})
OP(MaxUnpool2d, [](Tensor self, Tensor indices, Ints size, Tensor out) {
  put(out, at::max_unpool2d(self, indices.to(at::kLong), size));
})
OP(MaxUnpool2dBackward, [](Tensor gradient, Tensor, Tensor indices, Ints, Tensor out) {
  put(out, taken(gradient, indices, 2));
})
OP(MaxUnpool3d, [](Tensor self, Tensor indices, Ints size, Ints stride, Ints padding, Tensor out) {
  put(out, at::max_unpool3d(self, indices.to(at::kLong), size, stride, padding));
})
OP(MaxUnpool3dBackward, [](Tensor gradient, Tensor, Tensor indices, Ints, Ints, Ints, Tensor out) {
  put(out, taken(gradient, indices, 3));
})

// ---- padding
namespace {

// Two sizes for each of the last `dims` dimensions, which ATen reads unasked.
const Ints& for_dims(const Ints& padding, const Tensor& self, int64_t dims) {
  TORCH_CHECK(padding.size() == static_cast<size_t>(2 * dims) && self.dim() >= dims, "padding has ", padding.size(),
              " sizes, and ", dims, " dimensions of ", self.sizes(), " are padded");
  return padding;
}
// Negative sizes must leave something that can be reflected.
const Ints& reflecting(const Ints& padding, const Tensor& self, int64_t dims) {
  for_dims(padding, self, dims);
  for (int64_t dim = 0; dim < dims; ++dim) {
    const auto taken_away = [&](int64_t side) { return std::min<int64_t>(padding[2 * dim + side], 0); };
    TORCH_CHECK(self.size(-1 - dim) + taken_away(0) + taken_away(1) > 0, "padding ", padding, " leaves nothing of ",
                self.sizes());
  }
  return padding;
}

}  // namespace

#define PADDING(NAME, FUNCTION, DIMS, CHECKED)                                              \
  OP(NAME##DIMS##d, [](Tensor self, Ints padding, Tensor out) {                             \
    put(out, at::FUNCTION##DIMS##d(self, CHECKED(padding, self, DIMS)));                    \
  })                                                                                        \
  OP(NAME##DIMS##dBackward, [](Tensor gradient, Tensor self, Ints padding, Tensor out) {    \
    demand_leading(gradient, self, DIMS);                                                   \
    put(out, at::FUNCTION##DIMS##d_backward(gradient, self, CHECKED(padding, self, DIMS))); \
  })

PADDING(ReflectionPad, reflection_pad, 1, reflecting)
PADDING(ReflectionPad, reflection_pad, 2, reflecting)
PADDING(ReflectionPad, reflection_pad, 3, reflecting)
PADDING(ReplicationPad, replication_pad, 1, for_dims)
PADDING(ReplicationPad, replication_pad, 2, for_dims)
PADDING(ReplicationPad, replication_pad, 3, for_dims)

// ---- interpolation
#define NEAREST_1D(NAME, BACKWARD, FLOAT, FUNCTION)                                              \
  OP(NAME, [](Tensor self, Ints size, FLOAT w, Tensor out) {                                     \
    put(out, at::FUNCTION(self, size, factor(w, self.sizes().vec(), size, 1)));                  \
  })                                                                                             \
  OP(BACKWARD, [](Tensor gradient, Ints size, Ints in, double w, Tensor out) {                   \
    put(out, at::FUNCTION##_backward(gradient, size, in, factor(w, in, size, 1)));               \
  })
#define NEAREST_2D(NAME, BACKWARD, FLOAT, FUNCTION)                                                     \
  OP(NAME, [](Tensor self, Ints size, FLOAT h, FLOAT w, Tensor out) {                                   \
    const auto in = self.sizes().vec();                                                                 \
    put(out, at::FUNCTION(self, size, factor(h, in, size, 2), factor(w, in, size, 1)));                 \
  })                                                                                                    \
  OP(BACKWARD, [](Tensor gradient, Ints size, Ints in, double h, double w, Tensor out) {                \
    put(out, at::FUNCTION##_backward(gradient, size, in, factor(h, in, size, 2), factor(w, in, size, 1))); \
  })
#define NEAREST_3D(NAME, FUNCTION)                                                                          \
  OP(NAME, [](Tensor self, Ints size, double d, double h, double w, Tensor out) {                           \
    const auto in = self.sizes().vec();                                                                     \
    put(out, at::FUNCTION(self, size, factor(d, in, size, 3), factor(h, in, size, 2), factor(w, in, size, 1))); \
  })                                                                                                        \
  OP(NAME##Backward, [](Tensor gradient, Ints size, Ints in, double d, double h, double w, Tensor out) {    \
    put(out, at::FUNCTION##_backward(gradient, size, in, factor(d, in, size, 3), factor(h, in, size, 2),    \
                                     factor(w, in, size, 1)));                                              \
  })
#define BETWEEN_2D(NAME, FUNCTION)                                                                            \
  OP(NAME, [](Tensor self, Ints size, bool corners, double h, double w, Tensor out) {                         \
    const auto in = self.sizes().vec();                                                                       \
    put(out, at::FUNCTION(self, size, corners, factor(h, in, size, 2), factor(w, in, size, 1)));              \
  })
#define BETWEEN_2D_BACKWARD(NAME, FUNCTION)                                                                   \
  OP(NAME, [](Tensor gradient, Ints size, Ints in, bool corners, double h, double w, Tensor out) {            \
    put(out, at::FUNCTION(gradient, size, in, corners, factor(h, in, size, 2), factor(w, in, size, 1)));      \
  })

NEAREST_1D(UpsampleNearest1dV2, UpsampleNearest1dBackward, float, upsample_nearest1d)
NEAREST_1D(UpsampleNearestExact1d, UpsampleNearestExact1dBackward, double, _upsample_nearest_exact1d)
NEAREST_2D(UpsampleNearest2dV2, UpsampleNearest2dBackward, float, upsample_nearest2d)
NEAREST_2D(UpsampleNearestExact2d, UpsampleNearestExact2dBackward, double, _upsample_nearest_exact2d)
NEAREST_3D(UpsampleNearest3d, upsample_nearest3d)
NEAREST_3D(UpsampleNearestExact3d, _upsample_nearest_exact3d)
BETWEEN_2D(UpsampleBilinear2d, upsample_bilinear2d)
BETWEEN_2D_BACKWARD(UpsampleBilinear2dBackward, upsample_bilinear2d_backward)
BETWEEN_2D_BACKWARD(UpsampleBilinear2dBackwardV2, upsample_bilinear2d_backward)
BETWEEN_2D(UpsampleBilinear2dAA, _upsample_bilinear2d_aa)
BETWEEN_2D_BACKWARD(UpsampleBilinear2dAABackward, _upsample_bilinear2d_aa_backward)
BETWEEN_2D(UpsampleBicubic2d, upsample_bicubic2d)
BETWEEN_2D_BACKWARD(UpsampleBicubic2dBackward, upsample_bicubic2d_backward)
BETWEEN_2D(UpsampleBicubic2dAA, _upsample_bicubic2d_aa)
BETWEEN_2D_BACKWARD(UpsampleBicubic2dAAGrad, _upsample_bicubic2d_aa_backward)
OP(UpsampleLinear1d, [](Tensor self, Ints size, bool corners, double w, Tensor out) {
  put(out, at::upsample_linear1d(operand(self), size, corners, factor(w, self.sizes().vec(), size, 1)));
})
OP(UpsampleLinear1dBackward, [](Tensor gradient, Ints size, Ints in, bool corners, double w, Tensor out) {
  put(out, at::upsample_linear1d_backward(operand(gradient), size, in, corners, factor(w, in, size, 1)));
})
OP(UpsampleTrilinear3d, [](Tensor self, Ints size, bool corners, double d, double h, double w, Tensor out) {
  const auto in = self.sizes().vec();
  put(out, at::upsample_trilinear3d(operand(self), size, corners, factor(d, in, size, 3), factor(h, in, size, 2),
                                    factor(w, in, size, 1)));
})
OP(UpsampleTrilinear3dBackward,
   [](Tensor gradient, Ints size, Ints in, bool corners, double d, double h, double w, Tensor out) {
     put(out, at::upsample_trilinear3d_backward(operand(gradient), size, in, corners, factor(d, in, size, 3),
                                                factor(h, in, size, 2), factor(w, in, size, 1)));
   })
OP(GridSampler2D, [](Tensor self, Tensor grid, int64_t mode, int64_t padding, bool corners, Tensor out) {
  put(out, at::grid_sampler_2d(self, grid, mode, padding, corners));
})
OP(GridSampler2DBackward, [](Tensor gradient, Tensor self, Tensor grid, int64_t mode, int64_t padding, bool corners,
                             Bools wanted, Tensor of_self, Tensor of_grid) {
  const std::array<bool, 2> mask{wanted.at(0), wanted.at(1)};
  const auto [to_self, to_grid] = at::grid_sampler_2d_backward(gradient, self, grid, mode, padding, corners, mask);
  if (mask[0]) put(of_self, to_self);
  if (mask[1]) put(of_grid, to_grid);
})
OP(GridSampler3D, [](Tensor self, Tensor grid, int64_t mode, int64_t padding, bool corners, Tensor out) {
  put(out, at::grid_sampler_3d(self, grid, mode, padding, corners));
})
OP(GridSampler3DBackward, [](Tensor gradient, Tensor self, Tensor grid, int64_t mode, int64_t padding, bool corners,
                             Bools wanted, Tensor of_self, Tensor of_grid) {
  const std::array<bool, 2> mask{wanted.at(0), wanted.at(1)};
  const auto [to_self, to_grid] = at::grid_sampler_3d_backward(gradient, self, grid, mode, padding, corners, mask);
  if (mask[0]) put(of_self, to_self);
  if (mask[1]) put(of_grid, to_grid);
})

// ---- norms over channels
namespace {

// ATen's kernels beneath trust their caller with these.
void demand_channels(const Tensor& self, std::initializer_list<Tensor> of_channels) {
  TORCH_CHECK(self.dim() >= 2, "shape ", self.sizes(), " has no channels");
  for (const auto& tensor : of_channels)
    TORCH_CHECK(!tensor.defined() || tensor.numel() == self.size(1), "a tensor of shape ", tensor.sizes(),
                " for the channels of ", self.sizes());
}

}  // namespace

OP(BatchNorm, [](Tensor self, Tensor weight, Tensor bias, Tensor running_mean, Tensor running_variance, bool training,
                 double momentum, double epsilon, Tensor out, Tensor mean, Tensor inverse_deviation) {
  demand_channels(self, {weight, bias, running_mean, running_variance});
  TORCH_CHECK(training || (running_mean.defined() && running_variance.defined()),
              "runningMean or runningVar is a null pointer");
  const auto means = wide(running_mean), variances = wide(running_variance);  // which are written, too
  const auto [normal, of_mean, of_inverse] =
      at::native_batch_norm(wide(self), maybe(wide(weight)), maybe(wide(bias)), maybe(means), maybe(variances),
                            training, momentum, epsilon);
  put(out, normal);
  if (!training) return;
  put(running_mean, means);
  put(running_variance, variances);
  put(mean, of_mean);
  put(inverse_deviation, of_inverse);
})
OP(BatchNormBackward,
   [](Tensor gradient, Tensor self, Tensor weight, Tensor running_mean, Tensor running_variance, Tensor mean,
      Tensor inverse_deviation, bool training, double epsilon, Bools wanted, Tensor of_self, Tensor of_weight,
      Tensor of_bias) {
     const auto mask = three(wanted);
     const auto& used_mean = training ? mean : running_mean;  // the other one may be empty
     const auto& used_deviation = training ? inverse_deviation : running_variance;
     demand_channels(self, {weight, used_mean, used_deviation});
     demand_same_shape(gradient, self);
     TORCH_CHECK(used_mean.defined() && used_deviation.defined(),
                 training ? "saveMean or saveInvstd" : "runningMean or runningVar", " is a null pointer");
     const auto [to_self, to_weight, to_bias] = at::native_batch_norm_backward(
         wide(gradient), wide(self), maybe(wide(weight)), maybe(wide(running_mean)), maybe(wide(running_variance)),
         maybe(wide(mean)), maybe(wide(inverse_deviation)), training, epsilon, mask);
     if (mask[0]) put(of_self, to_self);
     if (mask[1]) put(of_weight, to_weight);
     if (mask[2]) put(of_bias, to_bias);
   })
OP(GroupNorm, [](Tensor self, Tensor weight, Tensor bias, int64_t batch, int64_t channels, int64_t pixels,
                 int64_t groups, double epsilon, Tensor out, Tensor mean, Tensor inverse_deviation) {
  const auto [normal, of_mean, of_inverse] = at::native_group_norm(self.contiguous(), maybe(weight), maybe(bias), batch,
                                                                   channels, pixels, groups, epsilon);
  put(out, normal);
  put(mean, of_mean);
  put(inverse_deviation, of_inverse);
})
OP(GroupNormBackward,
   [](Tensor gradient, Tensor self, Tensor mean, Tensor inverse_deviation, Tensor weight, int64_t batch,
      int64_t channels, int64_t pixels, int64_t groups, Bools wanted, Tensor of_self, Tensor of_weight,
      Tensor of_bias) {
     const auto mask = three(wanted);
     const auto [to_self, to_weight, to_bias] = at::native_group_norm_backward(
         gradient.contiguous(), self.contiguous(), mean, inverse_deviation, maybe(weight), batch, channels, pixels,
         groups, mask);
     if (mask[0]) put(of_self, to_self);
     if (mask[1]) put(of_weight, to_weight);
     if (mask[2]) put(of_bias, to_bias);
   })
