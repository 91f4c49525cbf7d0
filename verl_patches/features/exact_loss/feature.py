"""The feature exact_loss: its configuration, its switch, and the settings that exclude it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlay import ConfigurationError, Feature, Key


@dataclass(frozen=True)
class ExactLossSettings:
    """Weigh every micro batch by what it holds of the mini batch, over all data-parallel ranks, so that loss, gradients
    and reported losses are those of one pass over the whole mini batch."""

    enabled: bool = True


def check_averaging(config: Mapping[str, Any], settings: Any) -> None:
    """Reject Megatron's per-token loss, which would divide by tokens that verl does not count."""
    key = "actor_rollout_ref.actor.megatron.override_transformer_config"
    on_megatron = config["actor_rollout_ref"]["actor"].get("megatron") or {}
    if (on_megatron.get("override_transformer_config") or {}).get("calculate_per_token_loss"):
        raise ConfigurationError(
            f"{key}.calculate_per_token_loss=True makes Megatron divide by tokens that verl does not count. Remove it; "
            f"{EXACT_LOSS.switch} takes the mean over all tokens"
        )


EXACT_LOSS = Feature(
    name="exact_loss",
    purpose="The loss of an update equals that of one pass over its whole mini batch, however the batch is split.",
    section="actor_rollout_ref.overlay.exact_loss",
    settings=ExactLossSettings,
    keys=(Key("loss_agg_mode", "actor_rollout_ref.actor.loss_agg_mode", str, "token-mean"),),
    checks=(check_averaging,),
)
