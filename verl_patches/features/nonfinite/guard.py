"""An optimizer that steps only with finite gradients, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

StepResult = tuple[bool, float | None, int | None]


class NonfiniteGuard:
    """Stands for a Megatron optimizer whose gradients may hold inf or nan.

    `step` looks at the gradients first. If any rank found a non-finite value no rank steps: weights, main weights and
    optimizer state keep their bits. Everything else goes to the optimizer.

    Args:
        optimizer: has `step() -> (successful, grad_norm, zeros)`.
        gradients: the gradients as the backward pass left them on this rank, evaluated at every step.
        group: the ranks that step together; None is the world.
    """

    def __init__(
        self,
        optimizer: Any,
        gradients: Callable[[], Iterable[torch.Tensor]],
        group: dist.ProcessGroup | None = None,
    ):
        self._optimizer = optimizer
        self._gradients = gradients
        self._group = group
        self.skipped = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> StepResult:
        """Step, or skip: then the result is successful with a gradient norm of NaN, and `skipped` grows by one."""
        if not any_nonfinite(self._gradients(), self._group):
            return self._optimizer.step()
        self.skipped += 1
        return True, float("nan"), None


def any_nonfinite(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> bool:
    """Whether any tensor on any rank of `group` holds inf or nan. Collective: one all-reduce on the device.

    The largest and the smallest element say it (both become NaN if one element is), so no mask as large as the
    gradients is made.
    """
    found = torch.zeros(1, dtype=torch.int32, device="npu")
    for tensor in tensors:
        if tensor.numel():
            extremes = torch.stack([tensor.max(), tensor.min()])
            found.logical_or_(~torch.isfinite(extremes).all())
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return bool(found.item())
