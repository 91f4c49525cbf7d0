"""Kernels that training code calls through extensions of its own (see `npu_emulator.extensions`).

Each is one kernel of CANN (aclnn...) or of the Ascend Transformer Boost library (ATB), or what an extension commonly
wraps around it, under the name and with the arguments that such extensions export.
"""

import torch
from torch import Tensor

from .matmul import group_sizes, multiply_groups, sum_groups
from .mixture_of_experts import npu_moe_token_permute as permute_tokens
from .mixture_of_experts import npu_moe_token_unpermute as unpermute_tokens
from .registry import operator
from .rotary import npu_rotary_mul

_NAMESPACE = "npu_extension"


def _sizes(weight: Tensor, group_list, group_list_type: int | None) -> list[int]:
    return group_sizes(group_list, group_list_type or 0, weight.shape[0])


@operator(
    "npu_gmm(Tensor[] x, Tensor[] weight, Tensor[] bias, Tensor? group_list, int? group_type, int? group_list_type) "
    "-> Tensor[]",
    namespace=_NAMESPACE,
)
def npu_gmm(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor],
    group_list: Tensor | list[int] | None,
    group_type: int | None,
    group_list_type: int | None,
):
    """aclnnGroupedMatmulV4 (V2 for a list of numbers) with one x and one weight, and split_item 3.

    group_type 0: rows of x [tokens, k], group after group, times weight [groups, k, n]. group_type 2: for each group of
    columns of x [m, tokens] and rows of weight [tokens, n], their product: [groups, m, n].
    """
    if bias or len(x) != 1 or len(weight) != 1 or group_list is None:
        raise NotImplementedError("npu_gmm: only one x and one weight, with a group_list and no bias, is emulated")
    if group_type == 2:
        return [sum_groups(x[0], weight[0], group_sizes(group_list, group_list_type or 0, len(group_list)))]
    if group_type != 0:
        raise NotImplementedError(f"npu_gmm: group_type {group_type} is not emulated")
    return [multiply_groups(x[0], weight[0], _sizes(weight[0], group_list, group_list_type))]


@operator(
    "npu_gmm_backward(Tensor[] grad, Tensor[] x, Tensor[] weight, Tensor? group_list, int? group_list_type) "
    "-> (Tensor[], Tensor[], Tensor[])",
    namespace=_NAMESPACE,
)
def npu_gmm_backward(
    grad: list[Tensor],
    x: list[Tensor],
    weight: list[Tensor],
    group_list: Tensor | list[int] | None,
    group_list_type: int | None,
):
    """The gradients of npu_gmm with group_type 0: of x, of the weight, and none of a bias."""
    sizes = _sizes(weight[0], group_list, group_list_type)
    of_x = multiply_groups(grad[0], weight[0].transpose(1, 2), sizes)
    of_weight = sum_groups(x[0].t(), grad[0], sizes).reshape(weight[0].shape)
    return [of_x], [of_weight], []


@operator(
    "npu_gmm_backward_fusion(Tensor[] grad, Tensor[] weight, Tensor? group_list, int? group_list_type) "
    "-> (Tensor[], Tensor[], Tensor[])",
    namespace=_NAMESPACE,
)
def npu_gmm_backward_fusion(
    grad: list[Tensor], weight: list[Tensor], group_list: Tensor | list[int] | None, group_list_type: int | None
):
    """The gradient of x only: that of the weight is added elsewhere, with npu_groupmatmul_add_fp32."""
    return [multiply_groups(grad[0], weight[0].transpose(1, 2), _sizes(weight[0], group_list, group_list_type))], [], []


@operator(
    "npu_groupmatmul_add_fp32(Tensor x, Tensor weight, Tensor group_list, Tensor(a!) grad) -> ()",
    namespace=_NAMESPACE,
)
def npu_groupmatmul_add_fp32(x: Tensor, weight: Tensor, group_list: Tensor | list[int], grad: Tensor):
    """ATB GroupedMatmulInplaceAdd: adds, for each group of rows, ``x^T weight`` to its part of a float32 total.

    `group_list` holds running totals; `grad` may have any shape of groups * x.shape[1] * weight.shape[1] elements.
    """
    sizes = group_sizes(group_list, 0, len(group_list))
    grad.view(len(sizes), x.shape[1], weight.shape[1]).add_(sum_groups(x.float().t(), weight.float(), sizes))


@operator("npu_matmul_add_fp32(Tensor x, Tensor weight, Tensor(a!) C) -> ()", namespace=_NAMESPACE)
def npu_matmul_add_fp32(x: Tensor, weight: Tensor, total: Tensor):
    """ATB Linear with accumulation: adds ``x^T weight`` to a float32 total."""
    total.addmm_(x.t().float(), weight.float())


@operator(
    "npu_apply_fused_adamw_v2(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
    "Tensor(d!)? max_exp_avg_sq, Tensor state_step, float lr, float beta1, float beta2, float weight_decay, float eps, "
    "bool amsgrad, bool maximize) -> ()",
    namespace=_NAMESPACE,
)
def npu_apply_fused_adamw_v2(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    state_step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
):
    """aclnnApplyAdamWV2: one AdamW step in place, computed in float32; `state_step` counts from 1 and holds one number.

    With amsgrad the largest second moment so far, kept in `max_exp_avg_sq`, takes the place of the second moment.
    """
    step = float(state_step)
    gradient = -grad.float() if maximize else grad.float()
    first = exp_avg.float().lerp(gradient, 1 - beta1)
    second = exp_avg_sq.float().mul(beta2).addcmul(gradient, gradient, value=1 - beta2)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    if amsgrad:
        second = torch.maximum(max_exp_avg_sq.float(), second)
        max_exp_avg_sq.copy_(second)
    denominator = (second / (1 - beta2**step)).sqrt_().add_(eps)
    decayed = param.float() * (1 - lr * weight_decay)
    param.copy_(decayed.addcdiv_(first, denominator, value=-lr / (1 - beta1**step)))


@operator(
    "npu_apply_fused_ema_adamw(Tensor grad, Tensor(a!) var, Tensor(b!) m, Tensor(c!) v, Tensor(d!) s, Tensor step, "
    "float? lr, float? ema_decay, float? beta1, float? beta2, float? eps, int? mode, bool? bias_correction, float? "
    "weight_decay) -> (Tensor, Tensor, Tensor, Tensor)",
    namespace=_NAMESPACE,
)
def npu_apply_fused_ema_adamw(
    grad: Tensor,
    var: Tensor,
    m: Tensor,
    v: Tensor,
    s: Tensor,
    step: Tensor,
    lr: float,
    ema_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    mode: int,
    bias_correction: bool,
    weight_decay: float,
):
    """aclnnApplyFusedEmaAdam: one step in place of the parameter, both moments, and a moving average of the parameter.

    `mode` 1 decays the parameter (AdamW), 0 adds the decay to the gradient (Adam); `step` counts from 1 and holds one
    number. Returns the four that it wrote. Page: MindSpeed docs/ops/npu_apply_fused_ema_adamw.md.
    """
    count = float(step) if bias_correction else float("inf")
    gradient = grad if mode else grad.add(var, alpha=weight_decay)
    m.lerp_(gradient, 1 - beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    update = var * (weight_decay if mode else 0.0)
    update.addcdiv_(m / (1 - beta1**count), (v / (1 - beta2**count)).sqrt_().add_(eps))
    var.sub_(update, alpha=lr)
    s.lerp_(var, 1 - ema_decay)
    return var, m, v, s


@operator(
    "npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=0, bool? padded_mode=False) "
    "-> (Tensor, Tensor)",
    namespace=_NAMESPACE,
    differentiable=True,
)
def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = 0, padded_mode: bool | None = False
):
    """aclnnMoeTokenPermute; see torch_npu.npu_moe_token_permute."""
    return permute_tokens(tokens, indices, num_out_tokens, bool(padded_mode))


@operator(
    "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool? "
    "padded_mode=False, int[]? restore_shape=None) -> Tensor",
    namespace=_NAMESPACE,
    differentiable=True,
)
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool | None = False,
    restore_shape: list[int] | None = None,
):
    """aclnnMoeTokenUnpermute; see torch_npu.npu_moe_token_unpermute."""
    return unpermute_tokens(permuted_tokens, sorted_indices, probs, bool(padded_mode), restore_shape)


@operator(
    "npu_rotary_position_embedding(Tensor x, Tensor cos, Tensor sin, int mode=0) -> Tensor",
    namespace=_NAMESPACE,
    differentiable=True,
)
def npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0):
    """aclnnRotaryPositionEmbedding: mode 0 pairs element i with i + d/2, mode 1 pairs 2i with 2i + 1."""
    if mode not in (0, 1):
        raise RuntimeError(f"npu_rotary_position_embedding: mode must be 0 or 1, not {mode}")
    return npu_rotary_mul(x, cos, sin, "half" if mode == 0 else "interleave")


@operator(
    "npu_ring_attention_update(Tensor prev_attn_out, Tensor prev_softmax_max, Tensor prev_softmax_sum, Tensor "
    "cur_attn_out, Tensor cur_softmax_max, Tensor cur_softmax_sum, Tensor? actual_seq_qlen=None, str? layout='SBH') "
    "-> Tensor[]",
    namespace=_NAMESPACE,
)
def npu_ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    actual_seq_qlen: Tensor | None = None,
    layout: str | None = "SBH",
):
    """aclnnRingAttentionUpdate: merges attention over two parts of the keys.

    Outputs are [sequence, batch, heads * size] (SBH) or [tokens, heads, size] (TND), the largest scores and sums of
    exponentials [batch, heads, sequence, 8] or [tokens, heads, 8], the last dimension being copies.
    """
    largest = torch.maximum(prev_softmax_max, cur_softmax_max)
    before = prev_softmax_sum * (prev_softmax_max - largest).exp()
    now = cur_softmax_sum * (cur_softmax_max - largest).exp()
    total = before + now

    def scaled(output: Tensor, weight: Tensor) -> Tensor:
        share = (weight / total)[..., :1]
        if layout == "TND":
            return output.float() * share
        share = share.permute(2, 0, 1, 3)
        return (output.float().unflatten(-1, (share.shape[2], -1)) * share).flatten(2)

    merged = scaled(prev_attn_out, before) + scaled(cur_attn_out, now)
    return [merged.to(prev_attn_out.dtype), largest, total]
