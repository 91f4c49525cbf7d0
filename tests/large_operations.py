"""Measures the largest operation in a block of code, which shows whether it works in parts."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_VIEWS = (
    "view",
    "split",
    "unbind",
    "slice",
    "select",
    "detach",
    "alias",
    "_unsafe_view",
    "as_strided",
    "set_",
    "empty",
    "is_",
)


class LargestOperation(TorchDispatchMode):
    """Dispatch mode that records the size of the largest tensor, in elements, that a device operation reads or writes
    in the block; views do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if not function.__name__.startswith(_VIEWS):
            tensors = [each for each in tree_leaves((arguments, options)) if isinstance(each, torch.Tensor)]
            if any(each.device.type == "npu" for each in tensors):
                self.elements = max([self.elements, *(each.numel() for each in tensors)])
        return function(*arguments, **(options or {}))
