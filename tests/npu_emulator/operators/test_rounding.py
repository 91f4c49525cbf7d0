"""Fused operators, losses and variances compute in float32 and round once, as the references of upstream's tests do."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

KINDS = [torch.float16, torch.bfloat16]


def rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
    return torch_npu.npu_rms_norm(x, gamma)[0]


def swiglu_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    torch_npu.npu_swiglu(leaf).backward(gradient)
    return leaf.grad


def rotary_pos_emb(query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch_npu.npu_apply_rotary_pos_emb(query.clone(), query.clone(), cos, sin)[0]


def finalize(rows: Tensor, skip: Tensor, scales: Tensor) -> Tensor:
    order = torch.randperm(24, generator=torch.Generator().manual_seed(2)).int().npu()
    experts = torch.zeros(8, 3, dtype=torch.int32).npu()
    return torch_npu.npu_moe_finalize_routing(rows, skip, None, None, scales, order, experts, 2)


def unpermute(rows: Tensor, probs: Tensor) -> Tensor:
    order = torch.randperm(24, generator=torch.Generator().manual_seed(2)).int().npu()
    return torch_npu.npu_moe_token_unpermute(rows, order, probs)


def latent_cache(latent_and_rope: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    caches = [torch.zeros(1, 16, 1, size, dtype=gamma.dtype).npu() for size in (64, 512)]
    index = torch.arange(8).npu()
    torch_npu.npu_kv_rmsnorm_rope_cache(latent_and_rope, gamma, cos, sin, index, *caches, cache_mode="PA")
    return torch.cat(caches, -1)


def with_logits(x: Tensor, target: Tensor, weight: Tensor, positive: Tensor) -> Tensor:
    loss = functional.binary_cross_entropy_with_logits
    return loss(x, (target > 0).to(x.dtype), weight=weight, pos_weight=positive)


def with_logits_gradient(x: Tensor, target: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    functional.binary_cross_entropy_with_logits(leaf, (target > 0).to(x.dtype), reduction="sum").backward()
    return leaf.grad


# The operator, and the shapes of its random arguments.
OPERATORS: dict[str, tuple[Callable, list[tuple[int, ...]]]] = {
    "swiglu": (torch_npu.npu_swiglu, [(64, 128)]),
    "swiglu, its gradient": (swiglu_gradient, [(64, 64), (64, 128)]),
    "swiglu_backward": (torch_npu.npu_swiglu_backward, [(64, 64), (64, 128)]),
    "fast_gelu": (torch_npu.npu_fast_gelu, [(64, 64)]),
    "rms_norm": (rms_norm, [(64, 128), (128,)]),
    "rotary_mul": (torch_npu.npu_rotary_mul, [(4, 8, 3, 64), (4, 8, 1, 64), (4, 8, 1, 64)]),
    "interleave_rope": (torch_npu.npu_interleave_rope, [(4, 3, 8, 64), (4, 1, 8, 64), (4, 1, 8, 64)]),
    "apply_rotary_pos_emb": (rotary_pos_emb, [(4, 8, 3, 64), (4, 8, 1, 64), (4, 8, 1, 64)]),
    "moe_finalize_routing": (finalize, [(24, 32), (8, 32), (8, 3)]),
    "moe_token_unpermute": (unpermute, [(24, 32), (8, 3)]),
    "kv_rmsnorm_rope_cache": (latent_cache, [(8, 1, 1, 576), (512,), (8, 1, 1, 64), (8, 1, 1, 64)]),
    "binary_cross_entropy_with_logits": (with_logits, [(64, 32), (64, 32), (64, 1), (32,)]),
    "binary_cross_entropy_with_logits, its gradient": (with_logits_gradient, [(64, 32), (64, 32)]),
    "kl_div": (partial(functional.kl_div, reduction="sum", log_target=True), [(64, 32), (64, 32)]),
    "mse_loss": (functional.mse_loss, [(64, 32), (64, 32)]),
    "soft_margin_loss": (functional.soft_margin_loss, [(64, 32), (64, 32)]),
    "log_softmax": (partial(torch.log_softmax, dim=-1), [(64, 32)]),
    "var": (partial(torch.var, dim=-1), [(64, 32)]),
    "prod": (partial(torch.prod, dim=-1), [(64, 32)]),
    "logit": (partial(torch.logit, eps=0.01), [(64, 32)]),
    "cross": (torch.linalg.cross, [(64, 3), (64, 3)]),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_result_of_16_bits_is_that_in_float32_rounded(name, dtype):
    function, shapes = OPERATORS[name]
    generator = torch.Generator().manual_seed(1)
    arguments = [torch.randn(shape, generator=generator).to(dtype).npu() for shape in shapes]
    wide = function(*(argument.float() for argument in arguments))
    found = function(*arguments)
    assert wide.dtype == torch.float32 and found.dtype == dtype
    assert torch.equal(found.cpu(), wide.to(dtype).cpu())


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_rounding_between_would_be_noticed(dtype):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    gate, up = x.chunk(2, -1)
    assert not torch.equal(functional.silu(gate) * up, torch_npu.npu_swiglu(x.npu()).cpu())
