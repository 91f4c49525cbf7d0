"""Whether a Megatron optimizer steps, decided by the norm of its gradients.

Gradients can be finite and their norm not: the square of a norm above 1.8e19 overflows float32. Megatron then clips by
max_norm / inf = 0, and Adam steps on zeros: moments decay, weights decay and the step counts, and nothing says so.
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
    """What was decided in a step. norms: one of each optimizer in the chain, as Megatron computed them. whole: that of
    all of them, where the chain computes it itself."""

    norms: list[float] = field(default_factory=list)
    whole: float | None = None
    skipped: bool = False

    @property
    def norm(self) -> float:
        """The norm of all gradients."""
        return math.sqrt(sum(norm**2 for norm in self.norms)) if self.whole is None else self.whole


@contextmanager
def deciding_by_norm(optimizer: Any, group: dist.ProcessGroup | None) -> Iterator[NormDecision]:
    """Let `optimizer.step()` in the block change nothing where the norm is inf or nan on any rank of `group`.

    The norm that Megatron computes for clipping decides, just before it updates anything, in `step_with_ready_grads`;
    one all-reduce there makes the decision the same on all ranks. Where it clips nothing, the norm is computed here.
    A chain of Megatron-core 0.16 takes one norm over the gradients of all its optimizers, and asks none of them.
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
            # One of the two is called: the first in a chain, the second by an optimizer that is alone.
            stack.enter_context(_method(part, "get_grad_norm", noting(part.get_grad_norm)))
            stack.enter_context(_method(part, "clip_grad_norm", noting(part.clip_grad_norm)))
        if hasattr(optimizer, "get_grad_norm") and optimizer not in parts:
            stack.enter_context(_method(optimizer, "get_grad_norm", noting_whole(optimizer.get_grad_norm)))
        ready = step_unless_nonfinite(optimizer.step_with_ready_grads)
        stack.enter_context(_method(optimizer, "step_with_ready_grads", ready))
        yield decision


def any_rank(found: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether `found` holds on any rank of `group`. Collective: one all-reduce on the device."""
    flag = torch.tensor([int(found)], dtype=torch.int32, device="npu")
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


@contextmanager
def _method(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let `owner` have `function` in place of its class's method, within the block."""
    own = vars(owner).get(name)  # of the object itself, where somebody else has replaced the method before
    setattr(owner, name, function)
    try:
        yield
    finally:
        delattr(owner, name)
        if own is not None:
            setattr(owner, name, own)
