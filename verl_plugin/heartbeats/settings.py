"""The group `trainer.hang_detection`, which the trainer reads and hands to the other processes of its Ray job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from post_training.hang_detection.settings import EndSeconds, WarnSeconds, WatchSettings, limit_problems
from post_training.report.run_folder import at
from verl_plugin.libraries import LIBRARIES_KEY, libraries_of
from verl_plugin.sentences import invalid
from verl_plugin.trainer_modes import MODE_KEY, ONE_FORWARD, RECORDED

KEY = "trainer.hang_detection"
ENGINES = "verl_plugin.heartbeats.engines"
_GROUPS = {"warn_s": WarnSeconds, "end_s": EndSeconds}


@dataclass(frozen=True)
class HangDetection(WatchSettings):
    """Options to report a hung process, end the run if it does not recover, and save the collectives of waiting ranks.

    Attributes:
        enabled: whether hangs are detected.
        folder: for `heartbeat.json`, `faults.jsonl` and `calls`; empty for the parent of `trainer.default_local_dir`.
        calls_after_s: seconds without progress after which a rank writes its collectives.
    """

    enabled: bool = False
    folder: str = ""
    calls_after_s: float = field(default=60.0, metadata={"at_least": 0})

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> HangDetection:
        """Read the values of the group.

        Raises:
            ValueError: an option does not exist, or has a value of another type.
        """
        _check(cls, values, KEY)
        groups = {name: kind(**values[name]) for name, kind in _GROUPS.items() if name in values}
        return cls(**{**values, **groups})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> HangDetection:
        """Read it from the configuration of a whole job, resolved; see `from_values`."""
        values = dict(at(config, KEY) or {})
        values["folder"] = values.get("folder") or str(Path(str(at(config, "trainer.default_local_dir"))).parent)
        return cls.from_values(values)

    def packed(self) -> bytes:
        """Return the options as bytes for other processes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpacked(cls, content: bytes) -> HangDetection:
        """Read the bytes that `packed` returned."""
        return cls.from_values(json.loads(content))


def hang_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a job cannot detect hangs as configured.

    Args:
        config: resolved configuration of the whole job.
    """
    try:
        chosen = HangDetection.from_config(config)
    except ValueError as error:
        yield str(error)
        return
    if not chosen.enabled:
        return
    mode = at(config, MODE_KEY)
    if mode not in (RECORDED, ONE_FORWARD):
        yield invalid(f"{KEY}.enabled", True, f"the trainer {MODE_KEY}={mode} does not report hung ranks", "false")
    if ENGINES not in libraries_of(config):
        reason = f"training sends heartbeats only with {ENGINES} in {LIBRARIES_KEY}"
        yield invalid(f"{KEY}.enabled", True, reason, "false")
    yield from limit_problems(chosen, KEY)


def _check(kind: type, values: Mapping[str, Any], key: str) -> None:
    """Raise ValueError for an unknown option of a dataclass, or a value of the wrong type or range."""
    known = {each.name: each for each in fields(kind)}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{key}.{name} is invalid: no such option. Set one of {', '.join(known)}.")
        if name in _GROUPS:
            _check(_GROUPS[name], value, f"{key}.{name}")
        elif isinstance(known[name].default, float):
            least = known[name].metadata.get("at_least", 0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
                raise ValueError(invalid(f"{key}.{name}", value, f"not a number, or less than {least}", "seconds"))
        elif not isinstance(value, type(known[name].default)):
            raise ValueError(invalid(f"{key}.{name}", value, "it has the wrong type", f"e.g. {known[name].default!r}"))
