"""The overlay's typed configuration and the copy of it that is in force in this process.

The Hydra node is `actor_rollout_ref.overlay`; verl hands `config.actor_rollout_ref` to every worker, and so to every
process. Worker adapters call `activate` once; patches read `current()` at call time. Until something is activated every
feature is off, so importing the patches changes nothing by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from overlay import SettingsError
from overlay.configuration import checked, read_section
from verl_patches.features.dp_sync.feature import DpSyncSettings
from verl_patches.features.measure.feature import MeasureSettings
from verl_patches.features.mindspeed.feature import MindspeedSettings
from verl_patches.features.nonfinite.feature import NonfiniteSettings
from verl_patches.features.precision.feature import Precision
from verl_patches.features.reshard.feature import ReshardSettings
from verl_patches.features.residency.feature import ResidencySettings
from verl_patches.features.rollout_parallel.feature import RolloutSettings
from verl_patches.features.router_balance.feature import RouterBalanceSettings
from verl_patches.features.temperature.feature import TemperatureSettings
from verl_patches.features.watch.feature import WatchSettings

__all__ = ["NODE", "SET_ELSEWHERE", "OverlaySettings", "SettingsError", "activate", "current"]

NODE = "actor_rollout_ref.overlay"
# Fields that are set beside verl's own keys.
SET_ELSEWHERE = ("recompute_old_log_prob", "rollout_temperature", "load_from_hf")


@dataclass(frozen=True)
class OverlaySettings:
    """Everything that the overlay's features read. The last three fields lie beside verl's own keys."""

    reshard: ReshardSettings = field(default_factory=ReshardSettings)
    residency: ResidencySettings = field(default_factory=ResidencySettings)
    dp_sync: DpSyncSettings = field(default_factory=DpSyncSettings)
    temperature: TemperatureSettings = field(default_factory=TemperatureSettings)
    nonfinite: NonfiniteSettings = field(default_factory=NonfiniteSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    router_balance: RouterBalanceSettings = field(default_factory=RouterBalanceSettings)
    mindspeed: MindspeedSettings = field(default_factory=MindspeedSettings)
    measure: MeasureSettings = field(default_factory=MeasureSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)
    precision: Precision = "bfloat16"
    recompute_old_log_prob: bool = True
    rollout_temperature: float = 1.0
    load_from_hf: str = ""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> OverlaySettings:
        """Read `config` = verl's `actor_rollout_ref` node (a mapping, such as a DictConfig).

        Raises:
            SettingsError: an unknown key under `overlay`, or a value of the wrong kind.
        """
        node = config.get("overlay") or {}
        values = read_section(cls, node, NODE, elsewhere=SET_ELSEWHERE)
        actor, rollout = config.get("actor") or {}, config.get("rollout") or {}
        recompute = checked(
            actor.get("recompute_old_log_prob", True), bool, "actor_rollout_ref.actor.recompute_old_log_prob"
        )
        temperature = checked(rollout.get("temperature", 1.0), float, "actor_rollout_ref.rollout.temperature")
        folder = (actor.get("megatron") or {}).get("load_from_hf")
        folder = checked("" if folder is None else folder, str, "actor_rollout_ref.actor.megatron.load_from_hf")
        return cls(**values, recompute_old_log_prob=recompute, rollout_temperature=temperature, load_from_hf=folder)

    @classmethod
    def all_off(cls) -> OverlaySettings:
        """The state before activation: every patch calls upstream."""
        return cls(
            reshard=ReshardSettings(enabled=False),
            residency=ResidencySettings(enabled=False),
            dp_sync=DpSyncSettings(enabled=False),
            temperature=TemperatureSettings(enabled=False),
            nonfinite=NonfiniteSettings(enabled=False),
            mindspeed=MindspeedSettings(engine="off"),
            watch=WatchSettings(enabled=False),
        )


_current = OverlaySettings.all_off()


def activate(settings: OverlaySettings) -> None:
    """Put `settings` in force for this process."""
    global _current
    _current = settings


def current() -> OverlaySettings:
    """The settings in force in this process."""
    return _current
