"""The keys of verl's PPO configuration for Megatron with this overlay: type and range of each, as typed groups.

Each module holds the groups of one subject. Those for FSDP are in `fsdp_schema`, over the groups that both have.

One class is one group of keys; a field without a default is a key that verl reads without asking whether it is there.
Fields with a default are keys that verl reads with `get`, or that only one of the two supported releases has. Groups
that verl passes through are open here and checked where their reader is known: `vllm` and `override_transformer_config`
in `handed_over`, `overlay` in the settings of the features. `description` is the remedy, if the range alone does not
give it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from verl_patches.trainer.configuration_checks.schema.data import Data
from verl_patches.trainer.configuration_checks.schema.job import (
    Algorithm,
    MiniBatch,
    Monitoring,
    RayInit,
    RolloutInstance,
    Trainer,
)
from verl_patches.trainer.configuration_checks.schema.model import TrainedModel
from verl_patches.trainer.configuration_checks.schema.rewards import CustomReward, RewardModel
from verl_patches.trainer.configuration_checks.schema.rollout import Rollout
from verl_patches.trainer.configuration_checks.schema.training import Actor, Critic, Reference
from verl_patches.trainer.configuration_checks.schema.values import SHARED, KeyGroup


class ActorRolloutRef(KeyGroup):
    hybrid_engine: Literal[True] = Field(description=SHARED)
    model: TrainedModel
    actor: Actor
    ref: Reference
    rollout: Rollout
    overlay: dict[str, Any]


class Configuration(KeyGroup):
    """The whole configuration."""

    data: Data
    actor_rollout_ref: ActorRolloutRef
    critic: Critic
    reward_model: RewardModel
    custom_reward_function: CustomReward
    algorithm: Algorithm
    trainer: Trainer
    ray_init: RayInit
    monitoring_config: Monitoring | None = None
    rollout_instance: RolloutInstance | None = None
    mini_batch: MiniBatch | None = None


def field_at(place: Iterable[str], schema: type[BaseModel] = Configuration) -> FieldInfo | None:
    """Return the field at a place, given by the names of its groups and its own; None if there is no such field."""
    group: type[BaseModel] | None = schema
    field = None
    for part in place:
        named = {each.alias or name: each for name, each in group.model_fields.items()} if group else {}
        if part not in named:
            return None
        field, group = named[part], group_of(named[part])
    return field


def group_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the group that a field holds, or may hold; None for a single value."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
