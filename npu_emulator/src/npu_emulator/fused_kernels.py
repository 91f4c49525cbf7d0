"""vLLM-Ascend's Triton kernels that its graphs call, as operators of torch and torch_npu, which a graph can capture.

Without Triton for the device, vLLM-Ascend 0.23 leaves out the modules of these kernels, but two passes of its compiler
still put calls of them into graphs: `qkv_rmsnorm_rope` in bfloat16 with heads of 128, `muls_add` in models that scale
the experts' output. A replacement is installed when the module is loaded that would have used the kernel.
"""

from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor


def muls_add(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """x * scale + y."""
    return x * scale + y


def _halves_turned(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the first `2 * cosine.shape[-1]` elements of each head by its token's angles; halves belong together."""
    half = cosine.shape[-1]
    first, second, rest = heads.split([half, half, heads.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)


def qkv_rmsnorm_rope(
    input: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the projection, normalise each head of queries and keys, and turn them by their positions.

    Args:
        input: [tokens, q_hidden_size + 2 * kv_hidden_size].
        cos_sin_cache: [positions, rotated elements], cosines and then sines.
    """
    import torch_npu

    query, key, value = input.split([q_hidden_size, kv_hidden_size, kv_hidden_size], dim=-1)
    cosine, sine = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)

    def rotated(part: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        heads = part.unflatten(-1, (-1, head_dim)).contiguous()
        normal = torch_npu.npu_rms_norm(heads, weight, eps)[0]
        return _halves_turned(normal if bias is None else normal + bias, cosine, sine).flatten(1)

    return rotated(query, q_weight, q_bias), rotated(key, k_weight, k_bias), value.contiguous()


def _shapes_of_qkv(
    input: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the shapes of the results of `qkv_rmsnorm_rope`, for tracing."""
    sizes = (q_hidden_size, kv_hidden_size, kv_hidden_size)
    query, key, value = (input.new_empty(input.shape[0], size) for size in sizes)
    return query, key, value


def replace_muls_add(module: ModuleType) -> None:
    """Replace the launch in vllm_ascend.ops.triton.muls_add, unless Triton has a device."""
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        module.muls_add_triton = muls_add


def register_qkv_rmsnorm_rope(module: ModuleType) -> None:
    """Register the operator beside those of vllm_ascend.ops, where it has the kernel and Triton has no device."""
    from vllm.triton_utils import HAS_TRITON

    kernel = Path(str(module.__file__)).parent / "triton" / "linearnorm" / "split_qkv_rmsnorm_rope.py"
    if HAS_TRITON or not kernel.exists():
        return
    from vllm.utils.torch_utils import direct_register_custom_op

    direct_register_custom_op(
        op_name="qkv_rmsnorm_rope",
        op_func=qkv_rmsnorm_rope,
        fake_impl=_shapes_of_qkv,
        mutates_args=[],
        dispatch_key="PrivateUse1",
    )
