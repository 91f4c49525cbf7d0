"""Decide by the norm of its gradients whether a Megatron optimizer steps.

Gradients can be finite and their norm not: the square of a norm above 1.8e19 overflows float32. Megatron then clips by
max_norm / inf = 0, and Adam steps on zeros: moments decay, weights decay and the step counts, without any message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class NormDecision:
    """The decision about one step.

    Attributes:
        norms: Gradient norm of each optimizer in the chain, as Megatron computed it.
        whole: Norm over all of them, if the chain computes it itself.
        skipped: Whether no rank stepped.
    """

    norms: list[float] = field(default_factory=list)
    whole: float | None = None
    skipped: bool = False

    @property
    def norm(self) -> float:
        """The norm of all gradients."""
        return math.sqrt(sum(norm**2 for norm in self.norms)) if self.whole is None else self.whole


@contextmanager
def deciding_by_norm(optimizer: Any, group: dist.ProcessGroup | None) -> Iterator[NormDecision]:
    """Let `optimizer.step()` in the block change nothing if the norm is inf or NaN on any rank of `group`.

    The norm that Megatron computes for clipping decides, in `step_with_ready_grads`, just before anything is updated;
    one all-reduce there makes the decision the same on all ranks. If Megatron does not clip, the norm is computed here.
    A chain of Megatron-core 0.16 takes one norm over the gradients of all its optimizers and does not call theirs.
    """
    decision, parts = NormDecision(), getattr(optimizer, "chained_optimizers", [optimizer])

    def noting(upstream: Callable[..., float]) -> Callable[..., float]:
        def norm_of(*args: Any) -> float:
            norm = upstream(*args)
            decision.norms.append(float(norm))
            return norm

        return norm_of

    def noting_whole(upstream: Callable[..., float]) -> Callable[..., float]:
        def norm_of(*args: Any) -> float:
            decision.whole = float(norm := upstream(*args))
            return norm

        return norm_of

    def step_unless_nonfinite(upstream: Callable[[], bool]) -> Callable[[], bool]:
        def step() -> bool:
            if not decision.norms and decision.whole is None:
                for part in parts:
                    part.get_grad_norm()  # which notes it
            decision.skipped = any_rank(not math.isfinite(decision.norm), group)
            return decision.skipped or upstream()

        return step

    with ExitStack() as stack:
        for part in parts:
            # Only one of the two is called: the first in a chain, the second by a single optimizer.
            stack.enter_context(_method(part, "get_grad_norm", noting(part.get_grad_norm)))
            stack.enter_context(_method(part, "clip_grad_norm", noting(part.clip_grad_norm)))
        if hasattr(optimizer, "get_grad_norm") and optimizer not in parts:
            stack.enter_context(_method(optimizer, "get_grad_norm", noting_whole(optimizer.get_grad_norm)))
        ready = step_unless_nonfinite(optimizer.step_with_ready_grads)
        stack.enter_context(_method(optimizer, "step_with_ready_grads", ready))
        yield decision


def any_rank(found: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether `found` is true on any rank of `group`. Collective: one all-reduce on the device."""
    flag = torch.tensor([int(found)], dtype=torch.int32, device="npu")
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


@contextmanager
def _method(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let `owner` have `function` in place of its class's method, within the block."""
    own = vars(owner).get(name)  # set on the object itself if somebody else replaced the method before
    setattr(owner, name, function)
    try:
        yield
    finally:
        delattr(owner, name)
        if own is not None:
            setattr(owner, name, own)
