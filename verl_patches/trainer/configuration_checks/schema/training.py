"""Groups of keys of the models that train or score: actor, reference policy and critic."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_patches.trainer.configuration_checks.schema.model import (
    ActorMegatron,
    CriticModel,
    Megatron,
    Optim,
    TrainedMegatron,
)
from verl_patches.trainer.configuration_checks.schema.values import (
    MEGATRON,
    Aggregation,
    Count,
    CountOrNone,
    Fraction,
    KeyGroup,
    KlEstimator,
    Name,
    NotNegative,
    Seed,
    Whole,
)


class Profile(KeyGroup):
    use_profile: Literal[False] = Field(description="verl's profiler records only CUDA")
    profile_ranks: list[Whole] | None
    step_start: Annotated[int, Field(ge=-1)]
    step_end: Annotated[int, Field(ge=-1)]
    save_path: Name | None


class SavedContents(KeyGroup):
    contents: list[Literal["model", "optimizer", "extra", "hf_model"]]


class PolicyUpdate(KeyGroup):
    """Actor keys that Megatron and FSDP share."""

    ppo_mini_batch_size: Count
    ppo_micro_batch_size: None = Field(description="set ppo_micro_batch_size_per_gpu, which replaces it")
    ppo_micro_batch_size_per_gpu: CountOrNone
    use_dynamic_bsz: bool
    use_torch_compile: bool
    clip_ratio: NotNegative
    clip_ratio_low: Fraction | None
    clip_ratio_high: NotNegative | None
    clip_ratio_c: Annotated[float, Field(gt=1)]
    loss_agg_mode: Aggregation
    entropy_coeff: float
    use_kl_loss: bool
    kl_loss_coef: NotNegative
    kl_loss_type: KlEstimator
    ppo_epochs: Count
    shuffle: bool
    checkpoint: SavedContents
    recompute_old_log_prob: bool = True
    ppo_max_token_len_per_gpu: Count = 16384


class Actor(PolicyUpdate):
    strategy: Literal["megatron"] = Field(description=MEGATRON)
    data_loader_seed: Seed | None
    optim: Optim
    megatron: ActorMegatron
    profile: Profile
    load_weight: bool


class LogProbs(KeyGroup):
    """Reference-policy keys that Megatron and FSDP share."""

    use_torch_compile: bool
    log_prob_micro_batch_size: None = Field(description="set log_prob_micro_batch_size_per_gpu, which replaces it")
    log_prob_micro_batch_size_per_gpu: CountOrNone
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: Count = 16384


class Reference(LogProbs):
    strategy: Literal["megatron"] = Field(description=MEGATRON)
    megatron: Megatron
    profile: Profile
    load_weight: bool


class KlControl(KeyGroup):
    type: Literal["fixed", "adaptive"]
    kl_coef: NotNegative
    horizon: Count = 10000
    target_kl: Annotated[float, Field(gt=0)] = 0.1


class ValueUpdate(KeyGroup):
    """Critic keys that Megatron and FSDP share."""

    rollout_n: Count
    ppo_mini_batch_size: Count
    ppo_micro_batch_size: None = Field(description="set ppo_micro_batch_size_per_gpu, which replaces it")
    ppo_micro_batch_size_per_gpu: CountOrNone
    use_dynamic_bsz: bool
    ppo_epochs: Count
    shuffle: bool
    cliprange_value: NotNegative
    loss_agg_mode: Aggregation
    checkpoint: SavedContents
    ppo_max_token_len_per_gpu: Count = 32768
    forward_max_token_len_per_gpu: Count = 32768


class Critic(ValueUpdate):
    strategy: Literal["megatron"] = Field(description=MEGATRON)
    optim: Optim
    model: CriticModel
    megatron: TrainedMegatron
    load_weight: bool
    data_loader_seed: Seed | None
    kl_ctrl: KlControl
