"""An optimizer that steps only with finite gradients, on every rank alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from post_training.finite_steps.finite import all_finite
from post_training.finite_steps.norm import deciding_by_norm

StepResult = tuple[bool, float | None, int | None]


class NonfiniteGuard:
    """Wraps a Megatron optimizer whose gradients may hold inf or NaN, or be so large that their norm overflows.

    `step` looks at the gradients first, and at their norm once the optimizer knows it. If either is not finite on any
    rank, no rank steps: weights, main weights and optimizer state keep their bits. FSDP skips by the norm as well.

    Args:
        optimizer: Megatron's, one or several in a chain.
        gradients: the gradients as the backward pass left them on this rank, evaluated at every step.
        group: the ranks that step together; None is the world.
        remedy: end of the error for an optimizer that does not step as Megatron's do.
    """

    def __init__(
        self,
        optimizer: Any,
        gradients: Callable[[], Iterable[torch.Tensor]],
        group: dist.ProcessGroup | None = None,
        remedy: str = "switch the guard off to train with it",
    ):
        self._optimizer = optimizer
        self._gradients = gradients
        self._group, self._remedy = group, remedy
        self.skipped = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> StepResult:
        """Step, or skip: a skip returns success with a gradient norm of inf or NaN, and adds one to `skipped`.

        Raises:
            RuntimeError: the optimizer stepped although the norm is not finite, because it bypasses Megatron's
                step_with_ready_grads.
        """
        if any_nonfinite(self._gradients(), self._group):
            self.skipped += 1
            return True, math.nan, None
        with deciding_by_norm(self._optimizer, self._group) as decision:
            successful, norm, zeros = self._optimizer.step()
        if decision.skipped:
            self.skipped += 1
            return True, decision.norm, None
        if norm is None:  # nothing was clipped, but verl averages the norms of its updates
            norm = decision.norm
        if successful and not math.isfinite(norm):
            raise RuntimeError(
                f"{type(self._optimizer).__name__} stepped with a gradient norm of {norm}: it has no "
                f"step_with_ready_grads to skip; {self._remedy}"
            )
        return successful, norm, zeros


def any_nonfinite(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> bool:
    """Return whether any tensor on any rank of `group` holds inf or NaN. Collective: one all-reduce on the device.

    The host waits for the device once, at the end.
    """
    found = torch.zeros(1, dtype=torch.int32, device="npu")
    for tensor in tensors:
        found.logical_or_(~all_finite(tensor))
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return bool(found.item())
