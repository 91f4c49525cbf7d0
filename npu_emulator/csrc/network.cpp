// Activations, losses and norms, with their gradients.
#include <ATen/ExpandUtils.h>

#include <algorithm>

#include "operators.h"

using namespace cann;

namespace {

// The shape that lets a weight per channel, or one for all channels, broadcast over a tensor whose second dimension is
// the channels.
Ints shape_by_channel(const Tensor& weight, const Tensor& tensor) {
  Ints shape(tensor.dim(), 1);
  if (weight.numel() > 1) shape.at(shape.size() > 1 ? 1 : 0) = weight.numel();
  return shape;
}

}  // namespace

OP(Gelu, [](Tensor self, Tensor out) { put(out, at::gelu(self)); })
#if NPU_EMULATOR_CANN_9
OP(FastGelu, [](Tensor self, Tensor out) {
  const auto x = wide(self);
  put(out, x * at::sigmoid(1.702 * x));
})
OP(FastGeluBackward, [](Tensor gradient, Tensor self, Tensor out) {
  const auto x = wide(self), gate = at::sigmoid(1.702 * x);
  put(out, wide(gradient) * gate * (1 + 1.702 * x * (1 - gate)));
})
#endif
OP(GeluV2, [](Tensor self, int64_t approximate, Tensor out) {
  put(out, at::gelu(self, approximate ? "tanh" : "none"));
})
OP(GeluBackward, [](Tensor gradient, Tensor self, Tensor out) { put(out, at::gelu_backward(gradient, self)); })
OP(Softmax, [](Tensor self, int64_t dim, Tensor out) { put(out, at::softmax(operand(self), dim)); })
OP(SoftmaxBackward, [](Tensor gradient, Tensor result, int64_t dim, Tensor out) {
  demand_same_shape(gradient, result);
  put(out, at::_softmax_backward_data(operand(gradient), operand(result), dim, operand(result).scalar_type()));
})
OP(LogSoftmax, [](Tensor self, int64_t dim, Tensor out) { put(out, at::log_softmax(operand(self), dim)); })
OP(LogSoftmaxBackward, [](Tensor gradient, Tensor result, int64_t dim, Tensor out) {
  demand_same_shape(gradient, result);
  put(out, at::_log_softmax_backward_data(operand(gradient), operand(result), dim, operand(result).scalar_type()));
})
OP(SigmoidBackward, [](Tensor gradient, Tensor result, Tensor out) {
  put(out, at::sigmoid_backward(gradient, result));
})
OP(TanhBackward, [](Tensor gradient, Tensor result, Tensor out) { put(out, at::tanh_backward(gradient, result)); })
OP(SiluBackward, [](Tensor gradient, Tensor self, Tensor out) { put(out, at::silu_backward(gradient, self)); })
OP(ThresholdBackward, [](Tensor gradient, Tensor self, Scalar threshold, Tensor out) {
  put(out, at::threshold_backward(gradient, self, threshold));
})
OP(Softplus, [](Tensor self, Scalar beta, Scalar threshold, Tensor out) {
  put(out, at::softplus(self, beta, threshold));
})
OP(SoftplusBackward, [](Tensor gradient, Tensor self, Scalar beta, Scalar threshold, Tensor out) {
  put(out, at::softplus_backward(gradient, self, beta, threshold));
})
OP(LogSigmoidForward, [](Tensor self, Tensor out, Tensor) { put(out, at::log_sigmoid(self)); })
OP(LeakyRelu, [](Tensor self, Scalar slope, Tensor out) { put(out, at::leaky_relu(self, slope)); })
OP(LeakyReluBackward, [](Tensor gradient, Tensor self, Scalar slope, bool is_result, Tensor out) {
  put(out, at::leaky_relu_backward(gradient, self, slope, is_result));
})
OP(Hardtanh, [](Tensor self, Scalar lowest, Scalar highest, Tensor out) {
  put(out, at::hardtanh(self, lowest, highest));
})
OP(Threshold, [](Tensor self, Scalar threshold, Scalar value, Tensor out) {
  put(out, at::threshold(self, threshold, value));
})
OP(Softshrink, [](Tensor self, Scalar lambda, Tensor out) { put(out, at::softshrink(self, lambda)); })
OP(Hardshrink, [](Tensor self, Scalar lambda, Tensor out) { put(out, at::hardshrink(self, lambda)); })
OP(MishBackward, [](Tensor gradient, Tensor self, Tensor out) { put(out, at::mish_backward(gradient, self)); })
OP(HardswishBackward, [](Tensor gradient, Tensor self, Tensor out) {
  put(out, at::hardswish_backward(gradient, self));
})
OP(HardsigmoidBackward, [](Tensor gradient, Tensor self, Tensor out) {
  put(out, at::hardsigmoid_backward(gradient, self));
})
OP(Celu, [](Tensor self, Scalar alpha, Tensor out) { put(out, at::celu(self, alpha)); })
OP(Glu, [](Tensor self, int64_t dim, Tensor out) { put(out, at::glu(self, dim)); })
OP(Prelu, [](Tensor self, Tensor weight, Tensor out) {
  put(out, at::_prelu_kernel(self, weight.reshape(shape_by_channel(weight, self))));
})
OP(EluBackward, [](Tensor gradient, Scalar alpha, Scalar scale, Scalar input_scale, bool is_result, Tensor given,
                   Tensor out) {
  put(out, at::elu_backward(gradient, alpha, scale, input_scale, is_result, given));
})
OP(Elu, [](Tensor self, Scalar alpha, Scalar scale, Scalar input_scale, Tensor out) {
  put(out, at::elu(self, alpha, scale, input_scale));
})

// ---- gradients of activations
OP(HardtanhBackward, [](Tensor gradient, Tensor self, Scalar lowest, Scalar highest, Tensor out) {
  put(out, at::hardtanh_backward(gradient, self, lowest, highest));
})
OP(SoftshrinkBackward, [](Tensor gradient, Tensor self, Scalar lambda, Tensor out) {
  put(out, at::softshrink_backward(gradient, self, lambda));
})
OP(HardshrinkBackward, [](Tensor gradient, Tensor self, Scalar lambda, Tensor out) {
  put(out, at::hardshrink_backward(gradient, self, lambda));
})
OP(LogSigmoidBackward, [](Tensor gradient, Tensor self, Tensor, Tensor out) {
  put(out, gradient * at::sigmoid(-self));
})
OP(GluBackward, [](Tensor gradient, Tensor self, int64_t dim, Tensor out) {
  put(out, at::glu_backward(gradient, self, dim));
})
OP(PreluBackward, [](Tensor gradient, Tensor self, Tensor weight, Tensor of_self, Tensor of_weight) {
  const auto shape = shape_by_channel(weight, self);
  const auto [to_self, to_weight] = at::_prelu_kernel_backward(gradient, self, weight.reshape(shape));
  put(of_self, to_self);
  put(of_weight, at::sum_to(to_weight, shape).reshape(of_weight.sizes()));
})
OP(RReluWithNoise, [](Tensor self, Tensor noise, Scalar lower, Scalar upper, bool training, int64_t seed,
                      int64_t offset, Tensor out) {
  put(out, at::rrelu_with_noise(self, noise, lower, upper, training, generator(seed, offset)));
})
OP(GeluBackwardV2, [](Tensor gradient, Tensor self, std::string approximate, Tensor out) {
  put(out, at::gelu_backward(gradient, self, approximate));
})

OP(NLLLoss, [](Tensor self, Tensor target, Tensor weight, int64_t reduction, int64_t ignored, Tensor out,
               Tensor total) {
  const auto [loss, sum] =
      at::nll_loss_forward(wide(self), target.to(at::kLong), maybe(wide(weight)), reduction, ignored);
  put(out, loss);
  put(total, sum);
})
OP(NLLLossBackward, [](Tensor gradient, Tensor self, Tensor target, Tensor weight, int64_t reduction, int64_t ignored,
                       Tensor total, Tensor out) {
  put(out, at::nll_loss_backward(wide(gradient), wide(self), target.to(at::kLong), maybe(wide(weight)), reduction,
                                 ignored, wide(total)));
})
OP(MseLoss, [](Tensor self, Tensor target, int64_t reduction, Tensor out) {
  put(out, at::mse_loss(operand(self), operand(target), reduction));
})
OP(MseLossOut, [](Tensor self, Tensor target, int64_t reduction, Tensor out) {
  put(out, at::mse_loss(operand(self), operand(target), reduction));
})
OP(MseLossBackward, [](Tensor gradient, Tensor self, Tensor target, int64_t reduction, Tensor out) {
  put(out, at::mse_loss_backward(operand(gradient), operand(self), operand(target), reduction));
})
OP(L1Loss, [](Tensor self, Tensor target, int64_t reduction, Tensor out) {
  put(out, at::l1_loss(operand(self), operand(target), reduction));
})
OP(SmoothL1Loss, [](Tensor self, Tensor target, int64_t reduction, float beta, Tensor out) {
  put(out, at::smooth_l1_loss(operand(self), operand(target), reduction, beta));
})

OP(L1LossBackward, [](Tensor gradient, Tensor self, Tensor target, int64_t reduction, Tensor out) {
  const auto each = at::sign(operand(self) - operand(target)) * operand(gradient);
  put(out, reduction == at::Reduction::Mean ? each / static_cast<double>(self.numel()) : each);
})
OP(SmoothL1LossBackward, [](Tensor gradient, Tensor self, Tensor target, int64_t reduction, float beta, Tensor out) {
  put(out, at::smooth_l1_loss_backward(operand(gradient), operand(self), operand(target), reduction, beta));
})
OP(KlDiv, [](Tensor self, Tensor target, int64_t reduction, bool log_target, Tensor out) {
  put(out, at::kl_div(operand(self), operand(target), reduction, log_target));
})
OP(BinaryCrossEntropy, [](Tensor self, Tensor target, Tensor weight, int64_t reduction, Tensor out) {
  put(out, at::binary_cross_entropy(operand(self), operand(target), maybe(operand(weight)), reduction));
})
OP(BinaryCrossEntropyWithLogits, [](Tensor self, Tensor target, Tensor weight, Tensor positive, int64_t reduction,
                                    Tensor out) {
  put(out, at::binary_cross_entropy_with_logits(operand(self), operand(target), maybe(operand(weight)),
                                                 maybe(operand(positive)), reduction));
})
OP(SoftMarginLoss, [](Tensor self, Tensor target, int64_t reduction, Tensor out) {
  put(out, at::soft_margin_loss(operand(self), operand(target), reduction));
})

// ---- gradients of losses
OP(KlDivBackward, [](Tensor gradient, Tensor self, Tensor target, int64_t reduction, bool log_target, Tensor out) {
  const auto goal = operand(target);
  const auto each = -operand(gradient) * (log_target ? at::exp(goal) : at::where(goal > 0, goal, 0)).expand_as(self);
  put(out, reduction == at::Reduction::Mean ? each / self.numel() : each);
})
OP(BinaryCrossEntropyBackward, [](Tensor gradient, Tensor self, Tensor target, Tensor weight, int64_t reduction,
                                  Tensor out) {
  put(out, at::binary_cross_entropy_backward(operand(gradient), operand(self), operand(target), maybe(operand(weight)),
                                              reduction));
})
OP(BinaryCrossEntropyWithLogitsBackward, [](Tensor gradient, Tensor self, Tensor target, Tensor weight,
                                            Tensor positive, int64_t reduction, Tensor out) {
  const auto goal = operand(target), hits = positive.defined() ? operand(positive) * goal : goal;
  auto each = operand(gradient) * ((hits + 1 - goal) * at::sigmoid(operand(self)) - hits);
  if (weight.defined()) each = each * operand(weight);
  put(out, reduction == at::Reduction::Mean ? each / self.numel() : each);
})
OP(SoftMarginLossBackward, [](Tensor gradient, Tensor self, Tensor target, int64_t reduction, Tensor out) {
  put(out, at::soft_margin_loss_backward(operand(gradient), operand(self), operand(target), reduction));
})
OP(MultilabelMarginLoss, [](Tensor self, Tensor target, int64_t reduction, Tensor out, Tensor is_target) {
  const auto [loss, hits] = at::multilabel_margin_loss_forward(operand(self), target.to(at::kLong), reduction);
  put(out, loss);
  put(is_target, hits);
})
OP(NLLLoss2d, [](Tensor self, Tensor target, Tensor weight, int64_t reduction, int64_t ignored, Tensor out,
                 Tensor total) {
  const auto [loss, sum] =
      at::nll_loss2d_forward(wide(self), target.to(at::kLong), maybe(wide(weight)), reduction, ignored);
  put(out, loss);
  put(total, sum);
})
OP(NLLLoss2dBackward, [](Tensor gradient, Tensor self, Tensor target, Tensor weight, int64_t reduction,
                         int64_t ignored, Tensor total, Tensor out) {
  put(out, at::nll_loss2d_backward(wide(gradient), wide(self), target.to(at::kLong), maybe(wide(weight)), reduction,
                                   ignored, wide(total)));
})
// Rows of log_alpha are as long as the kernel likes them.
OP(CtcLoss, [](Tensor self, Tensor targets, Ints lengths, Ints target_lengths, int64_t blank, bool zero_infinity,
               Tensor loss, Tensor log_alpha) {
  const auto [each, alpha] = at::_ctc_loss(self, targets.to(at::kLong), lengths, target_lengths, blank, zero_infinity);
  put(loss, each);
  put(log_alpha.narrow(-1, 0, alpha.size(-1)), alpha);
})
OP(CtcLossBackward, [](Tensor gradient, Tensor self, Tensor targets, Ints lengths, Ints target_lengths, Tensor loss,
                       Tensor log_alpha, int64_t blank, bool zero_infinity, Tensor out) {
  TORCH_CHECK(!target_lengths.empty() && log_alpha.dim() == 3, "a batch of no targets, or log_alpha of shape ",
              log_alpha.sizes());
  const auto longest = *std::max_element(target_lengths.begin(), target_lengths.end());
  put(out, at::_ctc_loss_backward(gradient, self, targets.to(at::kLong), lengths, target_lengths, loss,
                                  log_alpha.narrow(-1, 0, 2 * longest + 1), blank, zero_infinity));
})

OP(LayerNorm, [](Tensor self, Ints shape, Tensor weight, Tensor bias, double epsilon, Tensor out, Tensor mean,
                 Tensor inverse_deviation) {
  const auto [normal, of_mean, of_inverse] =
      at::native_layer_norm(operand(self), shape, maybe(operand(weight)), maybe(operand(bias)), epsilon);
  if (!self.numel()) return;  // op-plugin gives its means another shape then
  put(out, normal);
  put(mean, of_mean);
  put(inverse_deviation, of_inverse);
})
OP(LayerNormBackward,
   [](Tensor gradient, Tensor self, Ints shape, Tensor mean, Tensor inverse_deviation, Tensor weight, Tensor bias,
      Bools wanted, Tensor of_self, Tensor of_weight, Tensor of_bias) {
     const std::array<bool, 3> mask{wanted.at(0), wanted.at(1), wanted.at(2)};
     const auto x = operand(self);  // types of the others may differ from it and from each other
     const auto alike = [&](const Tensor& tensor) { return tensor.defined() ? tensor.to(x.scalar_type()) : tensor; };
     const auto [to_self, to_weight, to_bias] =
         at::native_layer_norm_backward(alike(gradient), x, shape, alike(mean), alike(inverse_deviation),
                                        maybe(alike(weight)), maybe(alike(bias)), mask);
     if (mask[0]) put(of_self, to_self);
     if (mask[1]) put(of_weight, to_weight.reshape(of_weight.sizes()));
     if (mask[2]) put(of_bias, to_bias.reshape(of_bias.sizes()));
   })
