"""The feature profile: its configuration and its check. Without a step it records nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from overlay import ConfigurationError, Feature

KEY = "actor_rollout_ref.overlay.profile"
Level = Literal["Level0", "Level1", "Level2"]


@dataclass(frozen=True)
class ProfileSettings:
    """Which training steps torch_npu's profiler records, and on which ranks.

    steps: numbers from 1; each is recorded from its first generated token to the end of its update. level: how much of
    the device's own counters, as torch_npu names it. analyse: make the tables of a recording when its step ends, which
    takes its time on a device; otherwise torch_npu.profiler.profiler.analyse makes them later.
    """

    steps: Sequence = ()
    ranks: Sequence = (0,)
    level: Level = "Level1"
    analyse: bool = True


def check_steps(config: Mapping[str, Any], settings: Any) -> None:
    """Check that the chosen steps and ranks exist, and that there is a folder to write to."""
    chosen, trainer = settings.profile, config["trainer"]
    if not chosen.steps:
        return
    _check_numbers(f"{KEY}.steps", chosen.steps, 1, trainer["total_training_steps"], "trainer.total_training_steps")
    last = trainer["nnodes"] * trainer["n_gpus_per_node"] - 1
    if not chosen.ranks:
        raise ConfigurationError(f"{KEY}.ranks=[] records nothing. Set it to a rank, or set {KEY}.steps=[]")
    _check_numbers(f"{KEY}.ranks", chosen.ranks, 0, last, "the last of the dies")
    if not settings.measure.output_dir:
        raise ConfigurationError(
            f"{KEY}.steps={list(chosen.steps)} writes below actor_rollout_ref.overlay.measure.output_dir, which is "
            "empty. Set that to a folder"
        )


def _check_numbers(key: str, values: Sequence, least: int, most: int | None, limit: str) -> None:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigurationError(
                f"{key}={list(values)} is invalid: {value!r} is not a whole number of at least {least}"
            )
        if most is not None and value > most:
            raise ConfigurationError(f"{key}={list(values)} is invalid: {value} is never reached, {limit} is {most}")


PROFILE = Feature(
    name="profile",
    purpose="Chosen steps of training are recorded by torch_npu's profiler on chosen ranks.",
    section=KEY,
    settings=ProfileSettings,
    checks=(check_steps,),
)
