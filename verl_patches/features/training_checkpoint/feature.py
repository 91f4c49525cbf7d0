"""The feature training_checkpoint: its configuration, and the checks of verl's keys for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from overlay import ConfigurationError, Feature

_CONTENTS = ("model", "optimizer", "extra")
_KEY = "actor_rollout_ref.overlay.checkpoint"
_AT_LEAST = {"at_least": 0}


@dataclass(frozen=True)
class KeepBest:
    """Keep the `count` checkpoints of the steps with the best `metric`, a name in metrics.jsonl; empty keeps none."""

    metric: str = ""
    mode: Literal["max", "min"] = "max"
    count: int = field(default=1, metadata={"at_least": 1})


@dataclass(frozen=True)
class CheckpointSettings:
    """When a checkpoint is written, and which ones are kept once a newer one is complete.

    write: `background` writes while the next step generates, and needs residency; with `at_once` the step waits; `auto`
    means `background` if residency is on and Megatron trains.
    keep_last: number of the newest checkpoints that are kept; 0 keeps all. keep_every: also keep one every so many
    steps; 0 for none. keep_best: also keep those of the best steps.
    """

    write: Literal["auto", "background", "at_once"] = "auto"
    keep_last: int = field(default=0, metadata=_AT_LEAST)
    keep_every: int = field(default=0, metadata=_AT_LEAST)
    keep_best: KeepBest = field(default_factory=KeepBest)


def writes_in_background(settings: Any) -> bool:
    """Return whether Megatron's workers write while training goes on; `settings`: the overlay's."""
    return settings.checkpoint.write != "at_once" and settings.residency.enabled


def check_write(config: Mapping[str, Any], settings: Any) -> None:
    """Check that residency is on and Megatron trains, as writing from residency's host copies requires."""
    if settings.checkpoint.write != "background":
        return
    strategy = config["actor_rollout_ref"]["actor"]["strategy"]
    for key, value, needed in (
        ("actor_rollout_ref.overlay.residency.enabled", settings.residency.enabled, True),
        ("actor_rollout_ref.actor.strategy", strategy, "megatron"),
    ):
        if value != needed:
            raise ConfigurationError(
                f"{_KEY}.write=background writes Megatron's training state as residency keeps it on the host, but "
                f"{key}={str(value).lower()}. Set {_KEY}.write to auto"
            )


def check_resume(config: Mapping[str, Any], settings: Any) -> None:
    """Check that resume_from_path is given with the mode that reads it, and only with that."""
    options = config["trainer"]
    mode, path = options["resume_mode"], options["resume_from_path"]
    if mode == "resume_path" and not path:
        raise ConfigurationError(
            "trainer.resume_mode=resume_path needs trainer.resume_from_path, the folder global_step_N of a checkpoint"
        )
    if mode != "resume_path" and path:
        raise ConfigurationError(
            f"trainer.resume_from_path={path} has no effect with trainer.resume_mode={mode}. Set that to resume_path"
        )


def check_contents(config: Mapping[str, Any], settings: Any) -> None:
    """Check that a checkpoint has all that a resume needs, and nothing that can be derived from it."""
    models = {"actor_rollout_ref.actor": config["actor_rollout_ref"]["actor"]}
    if config["algorithm"]["adv_estimator"] == "gae":
        models["critic"] = config["critic"]
    for name, model in models.items():
        contents = model["checkpoint"]["contents"]
        if sorted(contents) != sorted(_CONTENTS):
            raise ConfigurationError(
                f"{name}.checkpoint.contents={list(contents)} is invalid: a checkpoint has other contents. Set it to "
                f"{list(_CONTENTS)}"
            )


def check_retention(config: Mapping[str, Any], settings: Any) -> None:
    """Check that only one key limits the newest checkpoints, and that there is such a limit if others are kept too."""
    keep, upstream = settings.checkpoint, config["trainer"]["max_actor_ckpt_to_keep"]
    if upstream and keep.keep_last:
        raise ConfigurationError(
            f"trainer.max_actor_ckpt_to_keep={upstream} and {_KEY}.keep_last={keep.keep_last} both limit the number of "
            "checkpoints. Set only keep_last"
        )
    besides = {"keep_every": keep.keep_every, "keep_best.metric": keep.keep_best.metric}
    for name, value in besides.items():
        if value and not (keep.keep_last or upstream):
            raise ConfigurationError(
                f"{_KEY}.{name}={value} has no effect with {_KEY}.keep_last=0, which keeps all. Set keep_last to 1 or "
                "more"
            )


TRAINING_CHECKPOINT = Feature(
    name="training_checkpoint",
    purpose="Weights and optimizer are saved by HuggingFace name, each element once, and load under any layout.",
    section=_KEY,
    settings=CheckpointSettings,
    checks=(check_write, check_resume, check_contents, check_retention),
)
