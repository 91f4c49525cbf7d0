"""Groups of keys of a trained model: its files, its optimizer and how Megatron divides it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from verl_patches.trainer.configuration_checks.schema.values import (
    LARGEST,
    PAGE,
    Count,
    CountOrNone,
    Fraction,
    KeyGroup,
    Name,
    NoneAsWord,
    NotNegative,
    RateSchedule,
    Seed,
)


class ExpertOverrides(KeyGroup):
    freeze_moe_router: bool = False
    fix_moe_router: bool = False


class ModelOverrides(KeyGroup):
    hf_config: dict[str, Any] = Field(alias="model_config")
    moe_config: ExpertOverrides


class Recomputation(KeyGroup):
    activations_checkpoint_method: Literal["uniform", "block"] | None
    activations_checkpoint_granularity: Literal["selective", "full"] | None
    activations_checkpoint_num_layers: CountOrNone


class TrainedModel(KeyGroup):
    path: str | None
    external_lib: Name | None
    override_config: ModelOverrides
    enable_gradient_checkpointing: bool
    gradient_checkpointing_kwargs: Recomputation
    trust_remote_code: bool = False
    use_shm: bool = False


class CriticModel(TrainedModel):
    tokenizer_path: str | None


class Optim(KeyGroup):
    lr: NotNegative
    clip_grad: NotNegative
    lr_warmup_steps_ratio: Fraction
    min_lr_ratio: Fraction | None
    warmup_style: RateSchedule
    total_training_steps: Annotated[int, Field(ge=-1, le=LARGEST)]
    weight_decay: NotNegative
    lr_warmup_steps: Annotated[int, Field(ge=-1, le=LARGEST)] = -1


class TransformerOptions(KeyGroup):
    """Fields of Megatron's configuration of the model; `handed_over` checks further ones against Megatron's names."""

    model_config = ConfigDict(extra="allow")

    num_layer_list: list[Count] | None = None
    moe_tp_extend_ep: bool = False


class Megatron(KeyGroup):
    param_offload: bool
    tensor_model_parallel_size: Count
    expert_model_parallel_size: Count
    expert_tensor_parallel_size: Annotated[CountOrNone, NoneAsWord]
    pipeline_model_parallel_size: Count
    virtual_pipeline_model_parallel_size: CountOrNone
    context_parallel_size: Literal[1] = Field(
        description="the attention of these models on Megatron-core 0.8.0 needs whole sequences; raise "
        f"tensor_model_parallel_size instead ({PAGE})"
    )
    sequence_parallel: bool
    use_distributed_optimizer: bool
    use_dist_checkpointing: bool
    dist_checkpointing_path: Name | None
    seed: Seed
    override_transformer_config: TransformerOptions


class TrainedMegatron(Megatron):
    grad_offload: bool
    optimizer_offload: bool


class ActorMegatron(TrainedMegatron):
    load_from_hf: str | None = None
