"""Groups of keys of rewards: a reward model, and the functions that stand in for it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from verl_patches.trainer.configuration_checks.schema.model import Megatron
from verl_patches.trainer.configuration_checks.schema.values import (
    MEGATRON,
    PAGE,
    Count,
    CountOrNone,
    KeyGroup,
    Name,
    NotNegative,
    Whole,
)


class RewardNetwork(KeyGroup):
    input_tokenizer: str | None
    path: Name
    external_lib: Name | None
    trust_remote_code: bool = False
    rm_tokenizer: Name | None = None


class Sandbox(KeyGroup):
    url: Name | None
    max_concurrent: Count


class OverlongBuffer(KeyGroup):
    enable: bool = False
    len: Whole = 0
    penalty_factor: NotNegative = 0.0
    log: bool = False


class Rewards(KeyGroup):
    """Reward keys that Megatron and FSDP share: the reward model, and the functions that stand in for it."""

    enable: Literal[False] = Field(
        description=f"a reward model is not supported yet; set custom_reward_function ({PAGE})"
    )
    model: RewardNetwork
    micro_batch_size: CountOrNone
    micro_batch_size_per_gpu: CountOrNone
    use_dynamic_bsz: bool
    max_length: CountOrNone
    reward_manager: Literal["naive", "prime", "batch", "dapo"]
    launch_reward_fn_async: bool
    sandbox_fusion: Sandbox
    forward_max_token_len_per_gpu: Count = 32768
    reward_kwargs: dict[str, Any] = {}
    overlong_buffer: OverlongBuffer | None = None


class RewardModel(Rewards):
    strategy: Literal["megatron"] = Field(description=MEGATRON)
    megatron: Megatron
    load_weight: bool


class CustomReward(KeyGroup):
    path: Name | None
    name: Name
    reward_kwargs: dict[str, Any] = {}
