"""The limits of the hang detector: seconds without progress by phase, and the rules that they must satisfy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

# torch_npu ends a process whose collective has waited this long, and the HCCL log of why is lost with it.
DEVICE_WATCHDOG_S = 1800.0
# Heartbeats that may be late before a process counts as one that does not answer.
MISSED_SIGNS = 3
_AT_LEAST = {"at_least": 0}


@dataclass(frozen=True)
class WarnSeconds:
    """Seconds after which a process is named. `silent`: without a heartbeat, in any phase; the others: without progress
    in that phase, however long the phase takes, where `start` is before the first heartbeat and `driver` is the
    training loop's own work. Progress is a micro batch, an optimizer step, a decode step, a bucket of a reshard, a
    scored answer or a part of a file."""

    silent: float = field(default=60.0, metadata=_AT_LEAST)
    start: float = field(default=900.0, metadata=_AT_LEAST)
    init: float = field(default=1800.0, metadata=_AT_LEAST)
    reshard: float = field(default=300.0, metadata=_AT_LEAST)
    rollout: float = field(default=300.0, metadata=_AT_LEAST)
    old_log_prob: float = field(default=600.0, metadata=_AT_LEAST)
    ref: float = field(default=600.0, metadata=_AT_LEAST)
    values: float = field(default=600.0, metadata=_AT_LEAST)
    update_critic: float = field(default=600.0, metadata=_AT_LEAST)
    update: float = field(default=600.0, metadata=_AT_LEAST)
    checkpoint: float = field(default=900.0, metadata=_AT_LEAST)
    reward: float = field(default=600.0, metadata=_AT_LEAST)
    driver: float = field(default=600.0, metadata=_AT_LEAST)


@dataclass(frozen=True)
class EndSeconds:
    """Seconds after which the run is ended; see `WarnSeconds`. Phases in which dies wait for each other end before the
    device's own watchdog, which would end the waiting processes and not the one that they wait for. All of them end
    before `supervise.py --silent-after`, which names nobody."""

    silent: float = field(default=900.0, metadata=_AT_LEAST)
    start: float = field(default=3600.0, metadata=_AT_LEAST)
    init: float = field(default=5400.0, metadata=_AT_LEAST)
    reshard: float = field(default=1500.0, metadata=_AT_LEAST)
    rollout: float = field(default=1500.0, metadata=_AT_LEAST)
    old_log_prob: float = field(default=1500.0, metadata=_AT_LEAST)
    ref: float = field(default=1500.0, metadata=_AT_LEAST)
    values: float = field(default=1500.0, metadata=_AT_LEAST)
    update_critic: float = field(default=1500.0, metadata=_AT_LEAST)
    update: float = field(default=1500.0, metadata=_AT_LEAST)
    checkpoint: float = field(default=3600.0, metadata=_AT_LEAST)
    reward: float = field(default=3600.0, metadata=_AT_LEAST)
    driver: float = field(default=3600.0, metadata=_AT_LEAST)


@dataclass(frozen=True)
class WatchSettings:
    """Name a process that stops answering, and end the run if it stays so."""

    enabled: bool = True
    interval_s: float = field(default=5.0, metadata={"at_least": 0.05})
    warn_s: WarnSeconds = field(default_factory=WarnSeconds)
    end_s: EndSeconds = field(default_factory=EndSeconds)


PHASES = tuple(each.name for each in fields(WarnSeconds) if each.name != "silent")


def limit_problems(chosen: WatchSettings, key: str) -> Iterator[str]:
    """Yield a sentence for each pair of settings that contradict each other.

    A process is named before the run is ended for it, and no heartbeat is late before it is due.

    Args:
        chosen: the settings.
        key: the configuration key that holds them.
    """
    for name in ("silent", *PHASES):
        warn, end = getattr(chosen.warn_s, name), getattr(chosen.end_s, name)
        if not warn <= end:  # NaN is neither above nor below
            yield (
                f"{key}.warn_s.{name}={warn:g} is not below {key}.end_s.{name}={end:g}, so the run would end before "
                "the warning. Lower the first or raise the second"
            )
        if not warn >= MISSED_SIGNS * chosen.interval_s:
            yield (
                f"{key}.warn_s.{name}={warn:g} is less than {MISSED_SIGNS} heartbeats, which come every "
                f"{key}.interval_s={chosen.interval_s:g} seconds. Raise the first or lower the second"
            )
