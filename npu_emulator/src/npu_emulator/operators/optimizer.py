"""Fused optimizer steps."""

from torch import Tensor

from .registry import operator


@operator(
    "npu_apply_adam_w.out(Scalar beta1_power, Scalar beta2_power, Scalar lr, Scalar weight_decay, Scalar beta1, "
    "Scalar beta2, Scalar epsilon, Tensor grad, Tensor? max_grad_norm, bool? amsgrad, bool? maximize, *, "
    "Tensor(a!)[] out) -> (Tensor, Tensor, Tensor)"
)
def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None = None,
    amsgrad: bool | None = None,
    maximize: bool | None = None,
    *,
    out: list[Tensor],
):
    """One AdamW step on ``out = [parameter, first moment, second moment]``.

    The powers are those of the step before: beta ** (step - 1).
    """
    if amsgrad:
        raise NotImplementedError("npu_apply_adam_w: amsgrad is not emulated")
    parameter, first, second = out
    grad = -grad if maximize else grad
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    first_correction = 1 - beta1_power * beta1
    second_correction = 1 - beta2_power * beta2
    denominator = (second / second_correction).sqrt_().add_(epsilon)
    parameter.mul_(1 - lr * weight_decay).addcdiv_(first, denominator, value=-lr / first_correction)
    return parameter, first, second
