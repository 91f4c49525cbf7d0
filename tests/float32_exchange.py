"""vLLM-Ascend's fused token dispatch and combine (MC2) in float32, for engines whose tokens are compared exactly.

torch_npu's kernels accept only 16-bit types. Three bfloat16 values hold a float32 value exactly, with 8 of its 24 bits
each, so tokens travel as rows three times as wide. The results are summed here, one expert at a time, because the
kernel would round the sum; it returns an expert's row unchanged if that expert has weight 1 and the others 0.
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
    """Make torch_npu's two functions accept float32, in graphs too."""
    import torch_npu

    dispatch, combine = torch_npu.npu_moe_distribute_dispatch_v2, torch_npu.npu_moe_distribute_combine_v2
    with (
        mock.patch.object(torch_npu, dispatch.__name__, _dispatch(dispatch)),
        mock.patch.object(torch_npu, combine.__name__, _combine(combine)),
    ):
        yield


def _parts(x: torch.Tensor) -> torch.Tensor:
    """Split float32 [n, width] into bfloat16 [n, 3 * width]."""
    high = x.to(torch.bfloat16)
    left = x - high.to(torch.float32)
    middle = left.to(torch.bfloat16)
    return torch.cat([high, middle, (left - middle.to(torch.float32)).to(torch.bfloat16)], -1)


def _whole(parts: torch.Tensor) -> torch.Tensor:
    """Join bfloat16 [n, 3 * width] into float32 [n, width]."""
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
