"""The feature dp_sync: its configuration and its switch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from overlay import ConfigurationError, Feature


@dataclass(frozen=True)
class DpSyncSettings:
    """Synchronize rollout ranks by collectives of the device instead of gloo on the host.

    lease_steps is the upper bound of a sync window in decode steps; blocks of the KV cache are reserved for all of
    them. With 1 the ranks synchronize before every forward.
    """

    enabled: bool = True
    lease_steps: int = field(default=16, metadata={"at_least": 1})


def check_one_machine(config: Mapping[str, Any], settings: Any) -> None:
    """Reject engines that pass on their KV cache: separate prefill and decode engines do not make the same forwards."""
    options = (config["actor_rollout_ref"]["rollout"].get("engine_kwargs") or {}).get("vllm") or {}
    if settings.dp_sync.enabled and options.get("kv_transfer_config"):
        raise ConfigurationError(
            f"{DP_SYNC.switch}=true cannot be combined with "
            "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_transfer_config: engines that transfer their KV cache do "
            "not make the same forwards. Remove one of them"
        )


DP_SYNC = Feature(
    name="dp_sync",
    purpose="Data-parallel rollout ranks agree over the device's collectives, once for several decode steps.",
    section="actor_rollout_ref.overlay.dp_sync",
    settings=DpSyncSettings,
    checks=(check_one_machine,),
)
