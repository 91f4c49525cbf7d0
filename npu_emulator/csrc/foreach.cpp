// Operators on lists of tensors, and fused optimizers.
#include <cmath>

#include "operators.h"

using namespace cann;

namespace {

template <class Function, class... Lists>
void each(const Tensors& out, Function function, const Lists&... lists) {
  (demand_as_many(out.size(), lists.size()), ...);
  for (size_t index = 0; index < out.size(); ++index) put(out[index], function(lists[index]...));
}

bool has_16_bits(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// Which types aclnnForeachCopy converts: ops-nn at v9.1.0, foreach/foreach_copy/op_host/foreach_copy_def.cpp. Its kernel
// (op_kernel/foreach_cast.h) rounds to the nearest even number, as torch does. The releases before 9.1.0 convert nothing;
// op-plugin asks for no conversion there. Beyond types it asks for nothing: docs/upstream/op-plugin-foreach-copy.md.
bool copies(at::ScalarType from, at::ScalarType to) {
  return from == to || (from == at::kFloat && has_16_bits(to)) || (has_16_bits(from) && to == at::kFloat);
}

void demand_one_type(const Tensors& list, const char* parameter) {
  for (const auto& tensor : list) demand_type_of(list[0], "the first of its list", tensor, parameter);
}

}  // namespace

#define EACH(NAME, FUNCTION) \
  OP(Foreach##NAME, [](Tensors self, Tensors out) { each(out, [](const Tensor& x) { return FUNCTION(x); }, self); })
EACH(Abs, at::abs)
EACH(Exp, at::exp)
EACH(Log, at::log)
EACH(Neg, at::neg)
EACH(Reciprocal, at::reciprocal)
EACH(Sigmoid, at::sigmoid)
EACH(Sqrt, at::sqrt)
EACH(Tanh, at::tanh)

// The scalar of all tensors comes as an aclScalar in the newer form, and as a tensor in the older one.
#define EACH_WITH_SCALAR_LIST(NAME, FUNCTION)                                                  \
  OP(Foreach##NAME##ScalarList, [](Tensors self, Scalars scalars, Tensors out) {               \
    each(out, [](const Tensor& x, const Scalar& y) { return FUNCTION(x, y); }, self, scalars); \
  })
#define EACH_WITH_SCALAR(NAME, FUNCTION)                                          \
  OP(Foreach##NAME##ScalarV2, [](Tensors self, Scalar scalar, Tensors out) {      \
    each(out, [&](const Tensor& x) { return FUNCTION(x, scalar); }, self);        \
  })                                                                              \
  OP(Foreach##NAME##Scalar, [](Tensors self, Tensor scalar, Tensors out) {        \
    each(out, [&](const Tensor& x) { return FUNCTION(x, scalar.item()); }, self); \
  })                                                                              \
  EACH_WITH_SCALAR_LIST(NAME, FUNCTION)
EACH_WITH_SCALAR(Add, at::add)
EACH_WITH_SCALAR(Sub, at::sub)
EACH_WITH_SCALAR(Mul, at::mul)
EACH_WITH_SCALAR(Div, at::div)
EACH_WITH_SCALAR(Pow, at::pow)
EACH_WITH_SCALAR(Maximum, at::clamp_min)
EACH_WITH_SCALAR(Minimum, at::clamp_max)

#define EACH_WITH_LIST(NAME, FUNCTION)                                                        \
  OP(Foreach##NAME##List, [](Tensors self, Tensors others, Tensors out) {                     \
    each(out, [](const Tensor& x, const Tensor& y) { return FUNCTION(x, y); }, self, others); \
  })
EACH_WITH_LIST(Mul, at::mul)
EACH_WITH_LIST(Div, at::div)
EACH_WITH_LIST(Maximum, at::maximum)
EACH_WITH_LIST(Minimum, at::minimum)
EACH_WITH_LIST(Pow, at::pow)

#define EACH_WITH_SCALED_LIST(NAME, FUNCTION)                                                           \
  OP(Foreach##NAME##ListV2, [](Tensors self, Tensors others, Scalar alpha, Tensors out) {               \
    each(out, [&](const Tensor& x, const Tensor& y) { return FUNCTION(x, y, alpha); }, self, others);   \
  })                                                                                                    \
  OP(Foreach##NAME##List, [](Tensors self, Tensors others, Tensor alpha, Tensors out) {                 \
    each(out, [&](const Tensor& x, const Tensor& y) { return FUNCTION(x, y, alpha.item()); }, self, others); \
  })
EACH_WITH_SCALED_LIST(Add, at::add)
EACH_WITH_SCALED_LIST(Sub, at::sub)

OP(ForeachLerpScalar, [](Tensors self, Tensors ends, Scalar weight, Tensors out) {
  each(out, [&](const Tensor& x, const Tensor& y) { return at::lerp(x, y, weight); }, self, ends);
})

#define EACH_WITH_TWO_LISTS(NAME, FUNCTION)                                                               \
  OP(Foreach##NAME##ScalarV2, [](Tensors self, Tensors first, Tensors second, Scalar value, Tensors out) { \
    each(out, [&](const Tensor& x, const Tensor& a, const Tensor& b) { return FUNCTION(x, a, b, value); }, \
         self, first, second);                                                                            \
  })                                                                                                      \
  OP(Foreach##NAME##Scalar, [](Tensors self, Tensors first, Tensors second, Tensor value, Tensors out) {  \
    each(out, [&](const Tensor& x, const Tensor& a, const Tensor& b) { return FUNCTION(x, a, b, value.item()); }, \
         self, first, second);                                                                            \
  })                                                                                                      \
  OP(Foreach##NAME##ScalarList, [](Tensors self, Tensors first, Tensors second, Tensor values, Tensors out) { \
    each(out, [&](const Tensor& x, const Tensor& a, const Tensor& b, const Tensor& value) {               \
      return FUNCTION(x, a, b, value.item());                                                             \
    }, self, first, second, values.flatten().unbind());                                                   \
  })
EACH_WITH_TWO_LISTS(Addcmul, at::addcmul)
EACH_WITH_TWO_LISTS(Addcdiv, at::addcdiv)

OP(ForeachNorm, [](Tensors self, Scalar p, Tensors out) {
  demand_as_many(out.size(), self.size());
  for (size_t index = 0; index < self.size(); ++index)
    put(out[index], at::norm(self[index], p).reshape(out[index].sizes()));
})
OP(ForeachCopy, [](Tensors self, Tensors out) {
  demand_one_type(self, "x");
  demand_one_type(out, "out");
  demand_that(self.empty() || out.empty() || copies(self[0].scalar_type(), out[0].scalar_type()), "Tensor out",
              "must have the dtype of x; or one of both float32, and the other float16 or bfloat16");
  put(out, self);
})
OP(ForeachZeroInplace, [](Tensors self) {
  for (const auto& tensor : self) tensor.zero_();
})
OP(ForeachNonFiniteCheckAndUnscale, [](Tensors self, Tensor found, Tensor inverse_scale) {
  for (const auto& tensor : self) {
    if (!at::isfinite(tensor).all().item<bool>()) found.fill_(1);
    tensor.mul_(inverse_scale.item());
  }
})

OP(AmpUpdateScale, [](Tensor scale, Tensor growth_tracker, Tensor found, double growth, double backoff, int64_t interval,
                       Tensor, Tensor) { at::_amp_update_scale_(scale, growth_tracker, found, growth, backoff, interval); })

// `step` counts the steps that were made before.
OP(ApplyAdamWV2,
   [](Tensor self, Tensor mean, Tensor square, Tensor most_square, Tensor gradient, Tensor step, float rate,
      float beta1, float beta2, float decay, float epsilon, bool amsgrad, bool maximize) {
     const auto direction = maximize ? -wide(gradient) : wide(gradient);
     const double steps = step.item<double>() + 1;
     const auto first = wide(mean).lerp(direction, 1 - beta1);
     auto second = wide(square).mul(beta2).addcmul(direction, direction, 1 - beta2);
     put(mean, first);
     put(square, second);
     if (amsgrad) put(most_square, second = at::maximum(wide(most_square), second));
     const auto deviation = second.sqrt() / std::sqrt(1 - std::pow(beta2, steps)) + epsilon;
     put(self, (wide(self) * (1 - rate * decay)).addcdiv(first, deviation, -rate / (1 - std::pow(beta1, steps))));
   })
// Also keeps a moving average of what is trained. Mode 1 decays it, as AdamW does; mode 0 adds the decay to the gradient.
OP(ApplyFusedEmaAdam,
   [](Tensor gradient, Tensor self, Tensor mean, Tensor square, Tensor average, Tensor step, double rate,
      double of_average, double beta1, double beta2, double epsilon, int64_t mode, bool corrected, double decay) {
     const auto direction = mode ? wide(gradient) : wide(gradient).add(wide(self), decay);
     const double steps = step.item<double>();
     const auto correction = [&](double beta) { return corrected ? 1 - std::pow(beta, steps) : 1.0; };
     const auto first = wide(mean).lerp(direction, 1 - beta1);
     const auto second = wide(square).mul(beta2).addcmul(direction, direction, 1 - beta2);
     auto change = (first / correction(beta1)) / ((second / correction(beta2)).sqrt() + epsilon);
     if (mode) change = change + wide(self) * decay;
     const auto result = wide(self) - change * rate;
     put(mean, first);
     put(square, second);
     put(average, wide(average).lerp(result, 1 - of_average));
     put(self, result);
   })
