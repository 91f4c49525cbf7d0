"""The job whose settings are searched: its configuration, its plan, and the command that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from post_training.overrides import setting
from post_training.plan.report import Machine
from post_training.report.run_folder import at
from post_training.tuning.space import Settings, overrides
from rehearsal.__main__ import parse_arguments
from rehearsal.plan import make_plan as plan_of_rehearsal
from rehearsal.tiny_model.architecture import TINY_MODELS
from scripts.plan import configuration_of, make_plan, read_model

OUTPUT, CHECKPOINTS = "actor_rollout_ref.overlay.measure.output_dir", "trainer.default_local_dir"
_REHEARSAL = "rehearse.sh"
_OWN = ("--output", "--resume", "--dry-run", "--stop", "--help", OUTPUT, CHECKPOINTS)


@dataclass(frozen=True)
class Subject:
    """A job.

    Attributes:
        config_name: of its configuration.
        given: Hydra overrides for every trial.
        model: its config.json, None if it was not given.
        machine: the machine that the plan must fit.
        swaps_optimizer: whether the optimizer is swapped to the host.
        command: a launcher or an entry point; empty if nothing is started.
    """

    config_name: str
    given: tuple[str, ...]
    model: Mapping[str, Any] | None
    machine: Machine
    swaps_optimizer: bool = False
    command: tuple[str, ...] = ()

    def configuration(self, settings: Settings) -> tuple[dict[str, Any], bool]:
        """Return the checked configuration with some settings, and whether the optimizer is swapped to the host.

        Raises:
            ValueError: it is rejected; one sentence.
        """
        config, swaps = configuration_of(self.config_name, [*self.given, *overrides(settings)], self.model)
        return config, self.swaps_optimizer or swaps

    def refusal(self, settings: Settings) -> str | None:
        """Return why these settings cannot run, by the checks and, if the model is known, by the plan; None if they
        can."""
        try:
            config, swaps = self.configuration(settings)
            if self.model is None:
                return None
            return "; ".join(make_plan(config, self.model, swaps, self.machine).problems()) or None
        except ValueError as error:
            return str(error)

    def layers(self, config: Mapping[str, Any]) -> int | None:
        """Return the number of layers of a model that Megatron divides into stages; None for any other."""
        divided = self.model is not None and at(config, "actor_rollout_ref.actor.strategy") == "megatron"
        return (self.model or {}).get("num_hidden_layers") if divided else None

    def run(self, folder: Path, steps: int, settings: Settings) -> list[str]:
        """Return the command of a trial, which writes to a folder, makes `steps` steps, and keeps no checkpoint."""
        own = [f"trainer.total_training_steps={steps}", *overrides(settings)]
        place = _rehearsal(self.command)
        if place is not None:
            words = [*self.command[: place + 1], "--output", str(folder), *self.command[place + 1 :]]
            return _with(words, own)
        own += [setting(OUTPUT, folder), setting(CHECKPOINTS, folder / "checkpoints")]
        return _with(self.command, [*own, "trainer.save_freq=-1", "trainer.resume_mode=disable"])


def is_rehearsal(command: Sequence[str]) -> bool:
    return _rehearsal(command) is not None


def describe_rehearsal(command: Sequence[str], more: Sequence[str]) -> Subject:
    """Return the subject of `bash scripts/rehearse.sh ...`, described by its own options.

    Raises:
        ValueError: it has an option that the search sets itself.
    """
    _refuse_own(command)
    options, _ = parse_arguments([*_with(command, more)][(_rehearsal(command) or 0) + 1 :])
    plan = plan_of_rehearsal(options, "tune")
    model = {"model_type": options.model_type, **TINY_MODELS[options.model_type]}
    machine = Machine(options.device_memory_mb << 20)
    return Subject(plan.job.configuration, plan.overrides, model, machine, command=tuple(_with(command, more)))


def describe_job(
    config_name: str, more: Sequence[str], command: Sequence[str], model: Path | None, machine: Machine, swaps: bool
) -> Subject:
    """Return the subject of another launcher or entry point, or of no command.

    Raises:
        OSError, ValueError: there is no model at that path, or the command has an option that the search sets itself.
    """
    _refuse_own(command)
    path = [] if model is None else [setting("actor_rollout_ref.model.path", model.parent)]
    described = None if model is None else read_model(model)
    behind = command[list(command).index("--") + 1 :] if "--" in command else command
    theirs = [word for word in behind if "=" in word and not word.startswith("-")]
    started = tuple(_with(command, more)) if command else ()
    return Subject(config_name, (*path, *theirs, *more), described, machine, swaps, started)


def _with(command: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return a command with further overrides; a launcher takes them after ``--``."""
    separated = "--" in command or not overrides or not any(word.endswith(".sh") for word in command)
    return [*command, *([] if separated else ["--"]), *overrides]


def _rehearsal(command: Sequence[str]) -> int | None:
    """Return the position of rehearse.sh in a command; None if it is not there."""
    return next((place for place, word in enumerate(command) if Path(word).name == _REHEARSAL), None)


def _refuse_own(command: Sequence[str]) -> None:
    if "--emulate" in command:
        raise ValueError("--emulate is in the command. Search with bash scripts/rehearse.sh, or with the job on NPUs")
    for word in command:
        if word.partition("=")[0] in _OWN:
            raise ValueError(f"{word} is in the command, but every trial gets its own below --output. Remove it")
