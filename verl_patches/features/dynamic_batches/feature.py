"""The feature dynamic_batches: verl's keys for it, and checks of the settings that they depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlay import ConfigurationError, Feature, Key

_NODE = "actor_rollout_ref"
_LIMIT = 16384  # verl's


@dataclass(frozen=True)
class TokenLimits:
    """The most tokens of a micro batch in each pass of a step; None if micro batches are sized by sequences."""

    update: int | None = None
    old_log_prob: int | None = None
    ref: int | None = None

    @classmethod
    def of(cls, settings: Any) -> TokenLimits:
        """Read the run's settings; the other passes follow the update unless they have settings of their own."""
        on, limit = settings.dynamic_update, settings.update_tokens
        others = {
            "old_log_prob": (settings.dynamic_old_log_prob, settings.old_log_prob_tokens),
            "ref": (settings.dynamic_ref, settings.ref_tokens),
        }
        return cls(
            limit if on else None,
            **{
                name: (limit if most is None else most) if (on if its is None else its) else None
                for name, (its, most) in others.items()
            },
        )


def limit_of_critic(critic: Mapping[str, Any], forward_only: bool) -> int | None:
    """Return the most tokens of a micro batch in a pass of the critic; None if micro batches are sized by sequences.

    verl at the cluster's commit has no separate key for the forward-only pass.
    """
    if not critic["use_dynamic_bsz"]:
        return None
    update = critic["ppo_max_token_len_per_gpu"]
    return critic.get("forward_max_token_len_per_gpu", update) if forward_only else update


def check_exact(config: Mapping[str, Any], settings: Any) -> None:
    """Check that exact_loss is on, because micro batches of different sizes need different weights in the loss."""
    if settings.dynamic_update and not settings.exact_loss.enabled:
        raise ConfigurationError(
            f"{DYNAMIC_BATCHES.switch}=True makes micro batches of unequal sizes, which "
            "actor_rollout_ref.overlay.exact_loss.enabled=False weights equally. Set it to True"
        )


def check_virtual_pipeline(config: Mapping[str, Any], settings: Any) -> None:
    """Reject virtual pipelines: Megatron's interleaved schedule needs a multiple of the stages in micro batches."""
    stages = (config[_NODE]["actor"].get("megatron") or {}).get("virtual_pipeline_model_parallel_size")
    if stages not in (None, 1):
        raise ConfigurationError(
            f"{_NODE}.actor.megatron.virtual_pipeline_model_parallel_size={stages} is not supported with dynamic "
            "batches. Set it to null, or use_dynamic_bsz and log_prob_use_dynamic_bsz to False"
        )


DYNAMIC_BATCHES = Feature(
    name="dynamic_batches",
    purpose="Micro batches on Megatron take as many sequences as fit into a number of tokens.",
    keys=(
        Key("dynamic_update", f"{_NODE}.actor.use_dynamic_bsz", bool, False),
        Key("update_tokens", f"{_NODE}.actor.ppo_max_token_len_per_gpu", int, _LIMIT),
        Key("dynamic_old_log_prob", f"{_NODE}.rollout.log_prob_use_dynamic_bsz", bool, None),
        Key("old_log_prob_tokens", f"{_NODE}.rollout.log_prob_max_token_len_per_gpu", int, None),
        Key("dynamic_ref", f"{_NODE}.ref.log_prob_use_dynamic_bsz", bool, None),
        Key("ref_tokens", f"{_NODE}.ref.log_prob_max_token_len_per_gpu", int, None),
    ),
    switch="actor_rollout_ref.actor.use_dynamic_bsz",
    is_on=lambda settings: TokenLimits.of(settings) != TokenLimits(),
    checks=(check_exact, check_virtual_pipeline),
)
