"""Finds the first operator that turns finite inputs into a result that is not finite, in forward, backward or update.

A layer's outputs and gradients only show where such a value was seen first. PyTorch's dispatch mode sees each call of
each pass in the order in which it is computed, and so finds the operator that made the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Origin:
    """Origin of the first value that is not finite.

    Attributes:
        operator: PyTorch's name, such as `aten.mm.default`.
        layer: name of the module whose forward or backward ran; empty outside of any.
        backward: whether it was in the backward pass.
        call: number of operators called before.
    """

    operator: str
    layer: str
    backward: bool
    call: int

    def sentence(self) -> str:
        """Describe the origin without the rank, which the caller knows."""
        place = (
            f"in the {'backward' if self.backward else 'forward'} of {self.layer}"
            if self.layer
            else "outside any layer"
        )
        return f"{self.operator} {place} (operator {self.call:,} of the pass)"


class FirstOperator(TorchDispatchMode):
    """Dispatch mode that remembers the first operator that makes a value that is not finite out of finite ones."""

    def __init__(self) -> None:
        super().__init__()
        self.origin: Origin | None = None
        self._calls = 0
        self._layers: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator, and check its inputs and results."""
        looks = self.origin is None
        given = looks and all(map(_is_finite, tree_leaves((args, kwargs))))
        results = func(*args, **(kwargs or {}))
        if given and not all(map(_is_finite, tree_leaves(results))) and not _is_uninitialised(func):
            layer, backward = self._layers[-1] if self._layers else ("", False)
            self.origin = Origin(str(func), layer, backward, self._calls)
        self._calls += 1
        return results

    @contextmanager
    def following(self, modules: list[torch.nn.Module]) -> Iterator[None]:
        """Track the layer whose forward or backward runs.

        Args:
            modules: models; the names of their submodules are the layers'.
        """
        handles = []
        for module in modules:
            for name, layer in module.named_modules():
                for before, after, backward in (
                    (layer.register_forward_pre_hook, layer.register_forward_hook, False),
                    (layer.register_full_backward_pre_hook, layer.register_full_backward_hook, True),
                ):
                    handles.append(before(self._enter(name, backward)))
                    handles.append(after(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, backward: bool) -> Any:
        def enter(*_: Any) -> None:
            self._layers.append((name, backward))

        return enter

    def _leave(self, *_: Any) -> None:
        if self._layers:
            self._layers.pop()


def _is_finite(value: Any) -> bool:
    """Return whether a leaf has no NaN and no positive infinity; attention masks hold negative infinity on purpose."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta:
        return True  # the mode sees the parts of other tensor subclasses in calls of their own
    if not value.is_floating_point() or not value.numel():
        return True
    return not bool((value.isnan() | (value == torch.inf)).any())


def _is_uninitialised(func: Any) -> bool:
    """Return whether an operator returns uninitialised memory."""
    return "empty" in str(func)
