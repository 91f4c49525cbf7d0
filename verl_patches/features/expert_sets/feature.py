"""The feature expert_sets: its configuration and its switch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlay import ConfigurationError, Feature


@dataclass(frozen=True)
class ExpertSetsSettings:
    """Compare the experts that rollout and training choose, for this share of all tokens.

    Tokens are drawn by a hash of the tokens up to them, so both sides draw the same ones. 0.001 of a step of the
    671B job (512 x 16 answers) are about 13,000 tokens in 58 layers, 13 MB that every rank receives. 1 compares all.
    """

    enabled: bool = True
    share: float = 0.001


def check_share(config: Mapping[str, Any], settings: Any) -> None:
    """Check that the share is above 0 and at most 1."""
    share = settings.expert_sets.share
    if not 0 < share <= 1:
        raise ConfigurationError(
            f"{EXPERT_SETS.section}.share={share} is invalid: it is a share of all tokens. Set it above 0 and at most "
            f"to 1, or set {EXPERT_SETS.switch}=False"
        )


EXPERT_SETS = Feature(
    name="expert_sets",
    purpose="For MoE models a metric counts how often rollout and training choose different experts for the same "
    "token.",
    section="actor_rollout_ref.overlay.expert_sets",
    settings=ExpertSetsSettings,
    checks=(check_share,),
)
