"""The feature router_balance: its configuration, its switch, and the checks of the runs that it would spoil."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlay import ConfigurationError, Feature


@dataclass(frozen=True)
class RouterBalanceSettings:
    """`forced` assigns tokens to experts in turn, in training, reference and rollout: for benchmarks only.

    It corresponds to the published job's `fix_router` (MindSpeed-LLM's `--fix-router`) and `VLLM_ENABLE_FIX_ROUTE`. A
    token's experts then depend on its place in the batch. That place differs between rollout and training, so their
    log-probs cannot be compared.
    """

    forced: bool = False


def check_random_weights(config: Mapping[str, Any], settings: Any) -> None:
    """Reject loaded weights, which would be trained with experts that they do not choose."""
    if config["actor_rollout_ref"]["actor"].get("load_weight", True):
        raise ConfigurationError(
            f"{ROUTER_BALANCE.switch}=True sends tokens to other experts than the weights choose, but "
            "actor_rollout_ref.actor.load_weight=True reads weights. Set one of them to False"
        )


def check_model(config: Mapping[str, Any], settings: Any) -> None:
    """Check that the overlay can balance the model's router, if this machine can read its config.json."""
    from post_training.models.families import families, find_family

    folder = config["actor_rollout_ref"]["model"]["path"]
    try:
        described = json.loads((Path(folder).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return
    family = find_family(described)
    if family is None or not family.balances_router:
        known = " and ".join(each.architecture for each in families() if each.balances_router)
        raise ConfigurationError(
            f"{ROUTER_BALANCE.switch}=True balances the routers of {known}, but the model in {folder} is "
            f"{described.get('architectures')}. Set it to False"
        )


ROUTER_BALANCE = Feature(
    name="router_balance",
    purpose="For benchmarks with random weights every expert gets the same number of tokens, in training and rollout.",
    section="actor_rollout_ref.overlay.router_balance",
    settings=RouterBalanceSettings,
    switch="actor_rollout_ref.overlay.router_balance.forced",
    is_on=lambda settings: settings.router_balance.forced,
    checks=(check_random_weights, check_model),
)
