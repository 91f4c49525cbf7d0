"""GPTModel takes the argument for multi-token prediction that verl 0.4.0 always passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.compatibility.feature import VERL_ON_MEGATRON_CORE

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.spec_utils import ModuleSpec


@wrap(
    "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
    feature=VERL_ON_MEGATRON_CORE,
    why="verl 0.4.0 passes mtp_block_spec, None for a model without multi-token prediction",
    upstream="not forwarded: specific to this pair of releases; megatron-core has it since 0.12",
    remove_when="the pinned megatron-core is 0.12 or later",
    evidence="executed",
)
def init(
    upstream: Callable[..., None], self: GPTModel, *args: Any, mtp_block_spec: ModuleSpec | None = None, **kwargs: Any
) -> None:
    if mtp_block_spec is not None:
        raise ValueError("megatron-core 0.8.0 has no multi-token prediction layers")
    upstream(self, *args, **kwargs)
