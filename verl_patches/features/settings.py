"""The overlay's typed configuration and the copy of it that is in force in this process.

The Hydra node is `actor_rollout_ref.overlay`; verl hands `config.actor_rollout_ref` to every worker, and so to every
process. Worker adapters call `activate` once; patches read `current()` at call time. Until something is activated every
feature is off, so importing the patches changes nothing by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_type_hints

NODE = "actor_rollout_ref.overlay"
PRECISIONS = ("bfloat16", "float32")


class SettingsError(ValueError):
    """A key of the configuration is unknown or holds a value of the wrong kind; the message names the full key."""


@dataclass(frozen=True)
class ReshardSettings:
    """Move updated weights to the rollout by a plan of byte ranges instead of gathering whole tensors.

    bucket_bytes bounds the staging memory of a die in each direction. overlap splits it in two, so that packing and
    transfer run at the same time. With dies_per_node, what many dies of a node need enters the node once; 0 means that
    all links are alike.
    """

    enabled: bool = True
    bucket_bytes: int = 64 * 1024 * 1024
    overlap: bool = False
    dies_per_node: int = 0


@dataclass(frozen=True)
class ResidencySettings:
    """Keep on the device only what the present phase needs."""

    enabled: bool = True


@dataclass(frozen=True)
class DpSyncSettings:
    """Let rollout ranks agree over the device's collectives instead of gloo on the host."""

    enabled: bool = True


@dataclass(frozen=True)
class TemperatureSettings:
    """Divide training logits by the rollout temperature and report rollout log-probs at that temperature."""

    enabled: bool = True


@dataclass(frozen=True)
class NonfiniteSettings:
    """Skip and count optimizer steps whose gradients hold inf or nan."""

    enabled: bool = True


@dataclass(frozen=True)
class RolloutSettings:
    """How the rollout spreads experts; 1 leaves vLLM's expert parallelism off."""

    expert_parallel_size: int = 1


@dataclass(frozen=True)
class PreforkSettings:
    """Fork Ray workers from a process that imported the stack once."""

    enabled: bool = False


@dataclass(frozen=True)
class MeasureSettings:
    """What a run records. `output_dir` empty means that no file is written."""

    verify_weights: bool = False
    output_dir: str = ""


@dataclass(frozen=True)
class OverlaySettings:
    """Everything that the overlay's features read. The last two fields come from verl's own keys."""

    reshard: ReshardSettings = field(default_factory=ReshardSettings)
    residency: ResidencySettings = field(default_factory=ResidencySettings)
    dp_sync: DpSyncSettings = field(default_factory=DpSyncSettings)
    temperature: TemperatureSettings = field(default_factory=TemperatureSettings)
    nonfinite: NonfiniteSettings = field(default_factory=NonfiniteSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    prefork: PreforkSettings = field(default_factory=PreforkSettings)
    measure: MeasureSettings = field(default_factory=MeasureSettings)
    precision: str = "bfloat16"
    recompute_old_log_prob: bool = True
    rollout_temperature: float = 1.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> OverlaySettings:
        """Read `config` = verl's `actor_rollout_ref` node (a mapping, such as a DictConfig).

        Raises:
            SettingsError: unknown key under `overlay`, or a value of the wrong kind.
        """
        node = config.get("overlay") or {}
        elsewhere = {"recompute_old_log_prob", "rollout_temperature"}
        values = _read_fields(cls, node, NODE, skip=elsewhere)
        if values["precision"] not in PRECISIONS:
            raise SettingsError(f"{NODE}.precision is {values['precision']!r}; choose one of {', '.join(PRECISIONS)}")
        if values["rollout"].expert_parallel_size < 1:
            raise SettingsError(f"{NODE}.rollout.expert_parallel_size must be at least 1")
        actor, rollout = config.get("actor") or {}, config.get("rollout") or {}
        recompute = _checked(
            actor.get("recompute_old_log_prob", True), bool, "actor_rollout_ref.actor.recompute_old_log_prob"
        )
        temperature = _checked(rollout.get("temperature", 1.0), float, "actor_rollout_ref.rollout.temperature")
        return cls(**values, recompute_old_log_prob=recompute, rollout_temperature=temperature)

    @classmethod
    def all_off(cls) -> OverlaySettings:
        """The state before activation: every patch calls upstream."""
        return cls(
            reshard=ReshardSettings(enabled=False),
            residency=ResidencySettings(enabled=False),
            dp_sync=DpSyncSettings(enabled=False),
            temperature=TemperatureSettings(enabled=False),
            nonfinite=NonfiniteSettings(enabled=False),
        )


def _read_fields(cls: type, node: Any, path: str, skip: frozenset[str] | set[str] = frozenset()) -> dict[str, Any]:
    """Values for the dataclass `cls` out of the mapping `node`; nested dataclasses are read recursively."""
    if not isinstance(node, Mapping):
        raise SettingsError(f"{path} must be a group of keys, not {node!r}")
    kinds = get_type_hints(cls)
    allowed = [f for f in fields(cls) if f.name not in skip]
    unknown = sorted(set(node) - {f.name for f in allowed})
    if unknown:
        names = ", ".join(f.name for f in allowed)
        raise SettingsError(f"unknown key {path}.{unknown[0]}; allowed keys are {names}")
    values: dict[str, Any] = {}
    for spec in allowed:
        kind = kinds[spec.name]
        if hasattr(kind, "__dataclass_fields__"):
            section = f"{path}.{spec.name}"
            values[spec.name] = kind(**_read_fields(kind, node.get(spec.name) or {}, section))
        elif node.get(spec.name) is not None:
            values[spec.name] = _checked(node[spec.name], kind, f"{path}.{spec.name}")
        else:
            values[spec.name] = spec.default if spec.default is not MISSING else spec.default_factory()
    return values


def _checked(value: Any, kind: type, key: str) -> Any:
    """`value` when it is of `kind` (an int also serves as a float, a bool never as a number)."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise SettingsError(f"{key} must be of type {kind.__name__}, not {value!r}")
    return value


_current = OverlaySettings.all_off()


def activate(settings: OverlaySettings) -> None:
    """Put `settings` in force for this process."""
    global _current
    _current = settings


def current() -> OverlaySettings:
    """The settings in force in this process."""
    return _current
