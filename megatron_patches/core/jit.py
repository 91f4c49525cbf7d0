"""Megatron's small fused functions run as they are written."""

from collections.abc import Callable
from typing import Any

from overlay import wrap
from verl_patches.features.compatibility.feature import MEGATRON_ON_NPU


@wrap(
    "megatron.core.jit:jit_fuser",
    feature=MEGATRON_ON_NPU,
    why="it is torch.compile, whose default backend has no code generator for an NPU",
    upstream="https://github.com/flagos-ai/Megatron-LM-FL/pull/127",
    remove_when="torch.compile generates code for an NPU by default",
    only_here=True,
    evidence="executed",
)
def jit_fuser(upstream: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    return function
