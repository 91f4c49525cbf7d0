"""Patch of verl's vocabulary-parallel entropy, which runs it without torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.compatibility.feature import MEGATRON_ON_NPU

if TYPE_CHECKING:
    import torch


@wrap(
    "verl.utils.megatron.tensor_parallel:_VocabParallelEntropy.forward",
    feature=MEGATRON_ON_NPU,
    why="it compiles a helper at every call, and torch.compile's default backend has no code generator for an NPU",
    upstream="docs/upstream/verl-entropy-compilation.md",
    remove_when="torch.compile generates code for an NPU by default",
)
def forward(upstream: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    from verl_patches.features.compatibility.compilation import without_compilation

    with without_compilation():
        return upstream(*args)
