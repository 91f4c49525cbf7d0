"""The keys of verl's PPO configuration for FSDP; `schema` has those for Megatron.

Values that have not been run with this overlay are rejected: LoRA, hybrid sharding, a critic without padding.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from verl_patches.trainer.configuration_checks.schema.data import Data
from verl_patches.trainer.configuration_checks.schema.job import Algorithm, Monitoring, RayInit, Trainer
from verl_patches.trainer.configuration_checks.schema.rewards import CustomReward, RewardNetwork, Rewards
from verl_patches.trainer.configuration_checks.schema.rollout import Generation
from verl_patches.trainer.configuration_checks.schema.training import LogProbs, PolicyUpdate, ValueUpdate
from verl_patches.trainer.configuration_checks.schema.values import (
    SEE,
    SHARED,
    Count,
    CountOrNone,
    Fraction,
    KeyGroup,
    Name,
    NotNegative,
    PositiveFraction,
)

_FSDP = "this configuration trains with FSDP; for Megatron use one that has actor_rollout_ref.actor.megatron"
_NOT_RUN = f"no other value is tested with the overlay on FSDP; {SEE}"
_CUDAS = "its kernels are for CUDA; set it to false"
Strategy = Annotated[Literal["fsdp", "fsdp2"], Field(description=_FSDP)]
FloatingPoint = Literal["fp32", "bf16", "float32", "bfloat16"]


class WrapPolicy(KeyGroup):
    min_num_params: Annotated[int, Field(ge=0)] = 0
    disable: bool = False
    transformer_layer_cls_to_wrap: list[Name] | None = None


class MixedPrecision(KeyGroup):
    param_dtype: FloatingPoint = "bf16"
    reduce_dtype: FloatingPoint = "fp32"
    buffer_dtype: FloatingPoint = "fp32"


class Sharding(KeyGroup):
    wrap_policy: WrapPolicy
    param_offload: bool
    reshard_after_forward: bool = True
    model_dtype: FloatingPoint | None = None
    mixed_precision: MixedPrecision | None = None


class TrainedSharding(Sharding):
    optimizer_offload: bool
    offload_policy: Literal[False] = Field(default=False, description=_NOT_RUN)
    fsdp_size: Literal[-1] = Field(default=-1, description=_NOT_RUN)


class FsdpModel(KeyGroup):
    path: str | None
    external_lib: Name | None
    override_config: dict[str, Any]
    enable_gradient_checkpointing: bool
    enable_activation_offload: Literal[False] = Field(default=False, description=_NOT_RUN)
    use_remove_padding: bool = False
    use_liger: Literal[False] = Field(default=False, description=_CUDAS)
    use_fused_kernels: Literal[False] = Field(default=False, description=_CUDAS)
    trust_remote_code: bool = False
    use_shm: bool = False
    lora_rank: Literal[0] = Field(default=0, description=f"every weight is trained; {SEE}")
    lora_alpha: Count = 16
    target_modules: str | list[Name] = "all-linear"


class ShardedOptim(KeyGroup):
    """Optimizer keys that actor and critic share."""

    lr: NotNegative
    lr_warmup_steps: Annotated[int, Field(ge=-1)] = -1
    lr_warmup_steps_ratio: Fraction
    warmup_style: Literal["constant", "cosine"]
    total_training_steps: Annotated[int, Field(ge=-1)]
    weight_decay: NotNegative
    betas: list[PositiveFraction] | None = None


class FsdpOptim(ShardedOptim):
    min_lr_ratio: Fraction = 0.0
    num_cycles: NotNegative = 0.5


class FsdpActor(PolicyUpdate):
    strategy: Strategy
    grad_clip: Annotated[float, Field(gt=0)]
    optim: FsdpOptim
    fsdp_config: TrainedSharding
    recompute_old_log_prob: Literal[True] = Field(default=True, description="only Megatron's update works without it")
    ulysses_sequence_parallel_size: Count = 1


class FsdpReference(LogProbs):
    strategy: Strategy
    fsdp_config: Sharding
    ulysses_sequence_parallel_size: Count = 1


class FsdpRollout(Generation):
    chat_scheduler: None = Field(default=None, description=f"asynchronous rollouts are not supported; {SEE}")
    use_fire_sampling: Literal[False] = Field(default=False, description=_NOT_RUN)
    layered_summon: bool = False


class FsdpActorRolloutRef(KeyGroup):
    hybrid_engine: Literal[True] = Field(description=SHARED)
    model: FsdpModel
    actor: FsdpActor
    ref: FsdpReference
    rollout: FsdpRollout
    overlay: dict[str, Any]


class FsdpCriticOptim(ShardedOptim):
    min_lr_ratio: None = Field(default=None, description="verl's critic on FSDP reads none; its cosine ends at 0")


class FsdpCriticModel(FsdpModel):
    use_remove_padding: Literal[False] = Field(default=False, description=_NOT_RUN)
    tokenizer_path: str | None
    fsdp_config: TrainedSharding


class FsdpCritic(ValueUpdate):
    strategy: Strategy
    optim: FsdpCriticOptim
    model: FsdpCriticModel
    forward_micro_batch_size: None = Field(description="set forward_micro_batch_size_per_gpu, which replaces it")
    forward_micro_batch_size_per_gpu: CountOrNone
    grad_clip: Annotated[float, Field(gt=0)]
    ulysses_sequence_parallel_size: Literal[1] = Field(default=1, description=_NOT_RUN)


class RewardSharding(KeyGroup):
    wrap_policy: WrapPolicy | None = None
    param_offload: bool = False
    reshard_after_forward: bool = True
    fsdp_size: Annotated[int, Field(ge=-1)] = -1


class FsdpRewardNetwork(RewardNetwork):
    use_shm: bool = False
    use_remove_padding: bool = False
    use_fused_kernels: bool = False
    fsdp_config: RewardSharding | None = None


class FsdpRewards(Rewards):
    strategy: Literal["fsdp"] = Field(description=_NOT_RUN)
    model: FsdpRewardNetwork
    ulysses_sequence_parallel_size: CountOrNone = 1


class FsdpConfiguration(KeyGroup):
    """The whole configuration."""

    data: Data
    actor_rollout_ref: FsdpActorRolloutRef
    critic: FsdpCritic
    reward_model: FsdpRewards
    custom_reward_function: CustomReward
    algorithm: Algorithm
    trainer: Trainer
    ray_init: RayInit
    monitoring_config: Monitoring | None = None
