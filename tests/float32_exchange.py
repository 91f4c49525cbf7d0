"""vLLM-Ascend's fused exchange of tokens (MC2) in float32, for engines whose tokens are compared exactly.

torch_npu gives the kernels 16 bits alone. Three bfloat16 numbers hold a float32 one exactly, with 8 bits of its 24
each: they travel as rows that are three times as wide. What comes back is summed here, an expert at a time, because the
kernel would round the sum; it moves one expert's row unchanged where that one has the weight 1 and the others 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

Kernel = Callable[..., Any]


@contextmanager
def exchange_in_float32() -> Iterator[None]:
    """Let torch_npu's two functions take float32, in graphs too."""
    import torch_npu

    dispatch, combine = torch_npu.npu_moe_distribute_dispatch_v2, torch_npu.npu_moe_distribute_combine_v2
    with (
        mock.patch.object(torch_npu, dispatch.__name__, _dispatch(dispatch)),
        mock.patch.object(torch_npu, combine.__name__, _combine(combine)),
    ):
        yield


def _parts(x: torch.Tensor) -> torch.Tensor:
    """[n, 3 * width] bfloat16 of [n, width] float32."""
    high = x.to(torch.bfloat16)
    left = x - high.to(torch.float32)
    middle = left.to(torch.bfloat16)
    return torch.cat([high, middle, (left - middle.to(torch.float32)).to(torch.bfloat16)], -1)


def _whole(parts: torch.Tensor) -> torch.Tensor:
    """[n, width] float32 of [n, 3 * width] bfloat16."""
    high, middle, low = parts.to(torch.float32).chunk(3, -1)
    return high + (middle + low)


def _dispatch(kernel: Kernel) -> Kernel:
    def dispatch(*, x: torch.Tensor, **others: Any) -> tuple[torch.Tensor, ...]:
        arrived, *rest = kernel(x=_parts(x), **others)
        return (_whole(arrived), *rest)

    return dispatch


def _combine(kernel: Kernel) -> Kernel:
    def combine(*, expand_x: torch.Tensor, expert_scales: torch.Tensor, **others: Any) -> torch.Tensor:
        parts, zeros = _parts(expand_x), torch.zeros_like(expert_scales)
        terms = []
        for expert in range(expert_scales.size(1)):
            one = torch.cat([zeros[:, :expert], zeros[:, :1] + 1, zeros[:, expert + 1 :]], 1)
            row = _whole(kernel(expand_x=parts, expert_scales=one, **others))
            terms.append(row * expert_scales[:, expert : expert + 1])
        return torch.stack(terms).sum(0)

    return combine
