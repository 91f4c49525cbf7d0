"""The feature watch: its switch, and the check of its limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlay import ConfigurationError, Feature
from post_training.hang_detection.settings import WatchSettings, limit_problems


def check_limits(config: Mapping[str, Any], settings: Any) -> None:
    """Check the limits: a process must be reported before the run ends for it, and no heartbeat be late before it is
    due."""
    for problem in limit_problems(settings.watch, WATCH.section):
        raise ConfigurationError(problem)


WATCH = Feature(
    name="watch",
    purpose="A hung rank is reported with its phase and duration; if it does not recover, the run stops.",
    section="actor_rollout_ref.overlay.watch",
    settings=WatchSettings,
    checks=(check_limits,),
)
