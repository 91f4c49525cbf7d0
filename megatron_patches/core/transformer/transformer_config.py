"""TransformerConfig with the fields of later releases that verl 0.4.0 sets or reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.compatibility.feature import VERL_ON_MEGATRON_CORE

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

_NEUTRAL_VALUES = {
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}


@wrap(
    "megatron.core.transformer.transformer_config:TransformerConfig.__init__",
    feature=VERL_ON_MEGATRON_CORE,
    why="verl 0.4.0 passes expert_tensor_parallel_size and computes layer offsets from fields of megatron-core 0.11",
    upstream="not forwarded: specific to this pair of releases; megatron-core has the fields since 0.11",
    remove_when="the pinned megatron-core is 0.11 or later",
)
def init(
    upstream: Callable[..., None],
    self: TransformerConfig,
    *args: Any,
    expert_tensor_parallel_size: int | None = None,
    **kwargs: Any,
) -> None:
    later_fields = {name: kwargs.pop(name, neutral) for name, neutral in _NEUTRAL_VALUES.items()}
    for name, value in later_fields.items():
        if value != _NEUTRAL_VALUES[name]:
            raise ValueError(f"{name}={value!r}: megatron-core 0.8.0 divides layers evenly over pipeline stages")
    upstream(self, *args, **kwargs)
    if expert_tensor_parallel_size not in (None, self.tensor_model_parallel_size):
        raise ValueError(f"expert_tensor_parallel_size={expert_tensor_parallel_size} must be the tensor parallel size")
    self.__dict__.update(later_fields)
