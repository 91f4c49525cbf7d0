"""Reads a run from its folder on any machine: its measurements, number of dies and model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from post_training.report.metrics import STEP_SECONDS, LoggedStep, ReportError, read_records, training_steps
from post_training.report.rates import COLUMNS, StepStatistics
from post_training.user_files import FileError, read_object, read_yaml

CONFIGURATION, METRICS, MODEL, METERS = "config.yaml", "metrics.jsonl", "model.json", "meters"
LENGTHS = ("prompt_length/mean", "response_length/mean")
TRUNCATED = "response_length/clip_ratio"
OFFLOAD = "offload"


@dataclass(frozen=True)
class Run:
    """A run as its folder describes it.

    Attributes:
        steps: numbers of the steps in the means.
        planned_steps: None if the run has made all of them, or the configuration has no number.
        statistics: means over the steps.
        offload: seconds in which tensors moved to and from the host, inside the stages.
        model: its config.json, if the run kept it or this machine has it.
    """

    name: str
    dies: int
    steps: tuple[int, ...]
    planned_steps: int | None
    statistics: StepStatistics
    offload: float | None
    model: Mapping[str, Any] | None
    emulated: bool
    conditions: str


def read_run(folder: Path, step: int | None = None, model: Path | None = None) -> Run:
    """Read a run's folder: the mean of all steps except the first, which also compiles, or a single step.

    Args:
        folder: the run's.
        step: the single step to read.
        model: a config.json to use instead of the run's own.

    Raises:
        ReportError: it is no run, no step has finished, or a file cannot be read; the message is one sentence.
    """
    config = read_configuration(folder)
    records = training_steps(read_records(folder / METRICS))
    chosen = _chosen(records, step, folder)
    prompts = _number(config, "data.train_batch_size", folder)
    sequences = prompts * _number(config, "actor_rollout_ref.rollout.n", folder)
    dies = _number(config, "trainer.n_gpus_per_node", folder) * _number(config, "trainer.nnodes", folder)
    planned = at(config, "trainer.total_training_steps")
    return Run(
        name=folder.resolve().name,
        dies=dies,
        steps=tuple(record.step for record in chosen),
        planned_steps=planned if isinstance(planned, int) and len(records) < planned else None,
        statistics=_statistics(chosen, sequences, folder),
        offload=_mean(record.stage_seconds()[OFFLOAD] for record in chosen),
        model=_model(model or folder / MODEL, given=model is not None) or _model_of(config),
        emulated=(folder / METERS).is_dir(),
        conditions=_conditions(config),
    )


def read_configuration(folder: Path) -> Mapping[str, Any]:
    """Read the configuration that a run kept.

    Raises:
        ReportError: it is no run, or its configuration cannot be read; the message is one sentence.
    """
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder. Pass the folder of a run, which contains {METRICS}.")
    file = folder / CONFIGURATION
    try:
        config = read_yaml(file)
    except FileError as error:
        if error.missing:
            raise ReportError(f"{folder} is not the folder of a run: it has no {CONFIGURATION}.") from error
        raise ReportError(f"{file} cannot be read: {error}.") from error
    if not isinstance(config, Mapping):
        raise ReportError(f"{file} is not the configuration of a run: it has no keys.")
    return config


def _chosen(records: Sequence[LoggedStep], step: int | None, folder: Path) -> Sequence[LoggedStep]:
    if not records:
        raise ReportError(f"{folder} has no finished step: there is nothing to summarise yet.")
    if step is None:
        return records[1:] or records
    chosen = [record for record in records if record.step == step]
    if not chosen:
        raise ReportError(f"{folder} has no step {step}: its steps are {records[0].step} to {records[-1].step}.")
    return chosen[-1:]


def _statistics(records: Sequence[LoggedStep], sequences: int, folder: Path) -> StepStatistics:
    means = {}
    for name in (STEP_SECONDS, *LENGTHS):
        found = [record.metrics.get(name) for record in records]
        values = [value for value in found if isinstance(value, int | float) and value >= 0]
        if len(values) < len(found):
            raise ReportError(f"{folder / METRICS}: {name} is missing in some steps, so no table can be made.")
        means[name] = fmean(values)
    seconds = {name: _mean(record.stage_seconds().get(name) for record in records) for name in COLUMNS[:-1]}
    # Offload is not a summand: tensors move at the beginning of a stage, within its seconds.
    aside = fmean(record.aside_seconds() for record in records)
    seconds["rest"] = max(0.0, means[STEP_SECONDS] - aside - sum(value or 0.0 for value in seconds.values()))
    prompt, response = (means[name] for name in LENGTHS)
    truncated = _mean(record.metrics.get(TRUNCATED) for record in records)
    return StepStatistics(sequences, prompt, response, truncated, seconds, means[STEP_SECONDS], aside)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def at(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None if it does not exist."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _number(config: Mapping[str, Any], key: str, folder: Path) -> int:
    value = at(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ReportError(f"{folder / CONFIGURATION}: {key}={value!r} is invalid. Set it to a number, at least 1.")
    return value


def _model(file: Path, given: bool) -> Mapping[str, Any] | None:
    if not given and not file.is_file():
        return None
    try:
        return read_object(file)
    except FileError as error:
        raise ReportError(f"{file} is not a model's config.json: {error}.") from error


def _model_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the config.json of the model that the configuration names; None if this machine does not have it."""
    folder = at(config, "actor_rollout_ref.model.path")
    try:
        return _model(Path(folder).expanduser() / "config.json", given=False) if isinstance(folder, str) else None
    except ReportError:
        return None


def _conditions(config: Mapping[str, Any]) -> str:
    """Describe the settings that decide whether the run is comparable with a published row."""
    model = "actor_rollout_ref.model"
    layers = at(config, f"{model}.gradient_checkpointing_kwargs.activations_checkpoint_num_layers")
    recomputed = f"{layers} layers of a stage" if at(config, f"{model}.enable_gradient_checkpointing") else "no layer"
    ignores = at(config, "actor_rollout_ref.rollout.ignore_eos")
    forced = at(config, "actor_rollout_ref.overlay.router_balance.forced")
    loaded = at(config, "actor_rollout_ref.actor.load_weight")
    return ", ".join(
        (
            "random weights" if loaded is False else "weights that were read",
            "ignore_eos" if ignores else "responses end where the model ends them",
            "experts balanced by force" if forced else "experts chosen by the router",
            f"{recomputed} recomputed",
        )
    )
