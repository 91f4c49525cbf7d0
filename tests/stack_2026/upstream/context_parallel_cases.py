"""The cases of `context_parallel_program`, which a test describes without importing Megatron."""

from __future__ import annotations

import dataclasses
from typing import Any

# Tokens of each sample's prompt and answer. None is a multiple of the chunks that ranks share.
SAMPLES = ((7, 6), (3, 3), (12, 9), (4, 5), (10, 20), (9, 8))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and how its ranks share it.

    Attributes:
        name: of the files with the results.
        model: the checkpoint's folder.
        context, tensor, pipeline, expert: parallel sizes; other ranks are data-parallel replicas.
        distributed: whether Megatron's optimizer is distributed, verl's default; a rank then has part of the gradients,
            which are not written.
        transformer: verl's `override_transformer_config`.
        replay: whether samples come with experts, which training uses (routing replay).
        fault: of `planted`; empty for none.
    """

    name: str
    model: str
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    distributed: bool = False
    transformer: dict[str, Any] = dataclasses.field(default_factory=dict)
    replay: bool = False
    fault: str = ""
