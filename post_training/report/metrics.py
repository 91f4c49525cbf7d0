"""Reads the metrics that a run writes, one line with a JSON object for each step, and its other records."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from post_training.user_files import RECORDS_BYTES, FileError, parse_json, read_object, read_text

# Stage of the published results table -> verl's metric with its seconds per step.
STAGES: Mapping[str, str] = {
    "rollout": "timing_s/gen",
    "old_log_prob": "timing_s/old_log_prob",
    "ref": "timing_s/ref",
    "values": "timing_s/values",
    "reward": "timing_s/reward",
    "adv": "timing_s/adv",
    "update_critic": "timing_s/update_critic",
    "update": "timing_s/update_actor",
    "reshard": "timing_s/reshard",
    "offload": "timing_s/offload",
}
# verl times the reshard inside generation; it is subtracted there, so that stages add up to a step.
CONTAINED_IN: Mapping[str, str] = {"reshard": "rollout"}
# Tensors move at the beginning of every stage, so this time is part of the other stages and not a summand.
SPREAD_OVER_OTHERS = "offload"
REWARD = "critic/score/mean"
STEP_SECONDS = "timing_s/step"
LOGPROB_DIFFERENCE = "training/rollout_logprob_diff_max"
LOGPROB_DIFFERENCE_MEAN = "training/rollout_logprob_diff_mean"
WEIGHTS_EXACT = "reshard/weights_exact"
VALUES_CHANGED_BY_CASTS = "reshard/values_changed_by_casts"
EXPERT_SETS_DIFFER, EXPERT_SETS_COMPARED = "rollout/expert_sets_differ", "rollout/expert_sets_compared"
EXPERT_TIES_DIFFER = "rollout/expert_ties_differ"
"""Share of the compared tokens x layers that rollout and training sent to different experts, and their count."""
EXPERT_SETS_REPLACED, EXPERT_BYTES = "rollout/expert_sets_replaced", "rollout/expert_ids_bytes"
"""Share of them for which training's router prefers other experts; bytes of the expert numbers sent with samples."""
SKIPPED_UPDATES = ("actor/nonfinite_steps", "critic/nonfinite_steps")
GENERATED_PROMPTS, TRAINED_PROMPTS = "sampling/generated_prompts", "sampling/trained_prompts"
GROUPS_WITH_GRADIENT, TRUNCATED_SHARE = "sampling/groups_with_gradient", "sampling/truncated_share"
# Inside verl's timer of a step, but not part of training: some steps also validate and save.
ASIDE = ("timing_s/save_checkpoint", "timing_s/testing")
UPDATE_SECONDS = STAGES["update"]
PEAK_BYTES_PREFIX = "memory/peak_bytes/"
ALLOCATED_BYTES_PREFIX = "memory/allocated_bytes/"
# In the order of a step; see features/residency/phases.py.
PHASES = (
    "init", "reshard", "rollout", "idle", "old_log_prob", "ref", "values", "update_critic", "update", "checkpoint",
    "critic_checkpoint",
)  # fmt: skip
COLLECTIVES_PREFIX = "collectives/"
# Events in events.jsonl: the first one of every start, and the last one of a start, with `status` and `message`.
BEGAN, ENDED = "ray_ready", "ended"
MEMORY = "memory"  # the folder with a file for each die
PATCHES = "patches"  # the folder with a file of executed patches for each process
# Number of a rollout's forwards without a prompt, and of synchronisations between its ranks.
DECODE_STEPS, AGREEMENTS = "rollout/decode_steps", "rollout/agreements"
# Ranks x graph size summed over those forwards, and the same sum with sequences spread evenly over ranks.
SLOT_STEPS, SLOT_STEPS_BOUND = "rollout/slot_steps", "rollout/slot_steps_bound"
# Number of exchanges of samples that stay on the workers that generated them.
DATA_COLLECTIVES = "samples/collectives"
# Bytes that the driver serializes for workers, and seconds from the first worker's start of a stage to the last one's.
DRIVER_BYTES, START_SKEW_PREFIX = "perf/driver_bytes_per_sample", "timing_start_skew/"


class ReportError(ValueError):
    """A run's files cannot be read; the message is one sentence that names the file and the place."""


@dataclass(frozen=True)
class LoggedStep:
    """One training step: its number, the time it ended (Unix seconds), and its metrics by verl's names.

    A metric is None where its value was not finite.
    """

    step: int
    time: float
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    def stage_seconds(self) -> dict[str, float | None]:
        """Return the seconds of each stage of this step; None for a stage that the run did not time."""
        seconds = {stage: self.metrics.get(name) for stage, name in STAGES.items()}
        for inner, outer in CONTAINED_IN.items():
            part, whole = seconds[inner], seconds[outer]
            if part is not None and whole is not None:
                seconds[outer] = max(0.0, whole - part)
        return seconds

    def aside_seconds(self) -> float:
        """Return the seconds in which this step saved a checkpoint or validated; 0 if it did neither."""
        return sum(self.metrics.get(name) or 0.0 for name in ASIDE)

    def training_seconds(self) -> float | None:
        """Return the seconds of this step without saving and validation; None if the step was not timed."""
        step = self.metrics.get(STEP_SECONDS)
        return None if step is None else max(0.0, step - self.aside_seconds())


def read_records(path: Path) -> list[LoggedStep]:
    """Read a metrics file, in the order of its lines; empty if there is no file, as before the first step.

    A last line without its line end is still being written and is left out.

    Raises:
        ReportError: a complete line is not JSON of the expected form.
    """
    lines = enumerate(_complete_lines(path), start=1)
    return [_parse(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def training_steps(records: Iterable[LoggedStep]) -> list[LoggedStep]:
    """Leave out the record of a validation before training, which verl logs as step 0."""
    return [record for record in records if record.step > 0]


def read_entries(path: Path, **needed: type) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line; empty if there is no file.

    A last line that is still being written is left out.

    Args:
        path: of the file.
        needed: keys that every entry must have, with the type of their values; a float may be a whole number.

    Raises:
        ReportError: a complete line is not a JSON object, or lacks a needed key.
    """
    entries = []
    for number, line in enumerate(_complete_lines(path), start=1):
        if line:
            entry = _json(line, f"{path}, line {number}")
            _check_keys(entry, f"{path}, line {number}", needed)
            entries.append(entry)
    return entries


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Read a run's events.jsonl: each event has a time and a name, the last one of a start a status and a message too.

    Raises:
        ReportError: see `read_entries`.
    """
    path = folder / "events.jsonl"
    events = read_entries(path, time=float, event=str)
    for number, event in enumerate(events, start=1):
        if event["event"] == ENDED:
            _check_keys(event, f"{path}, entry {number}", {"status": str, "message": str})
    return events


def read_objects(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Read one JSON object from each file, in the order of the paths; missing files are left out.

    Raises:
        ReportError: a file is not a JSON object.
    """
    found = []
    for path in paths:
        try:
            found.append(read_object(path))
        except FileError as error:
            if not error.missing:
                raise ReportError(f"{error}.") from error
    return found


def _complete_lines(path: Path) -> list[str]:
    """Return the lines of a file that a run appends to, without an unfinished last one; empty if there is no file."""
    try:
        return read_text(path, RECORDS_BYTES).rpartition("\n")[0].split("\n")
    except FileError as error:
        if error.missing:
            return []
        raise ReportError(f"{path} cannot be read: {error}.") from error


def _json(line: str, place: str) -> Any:
    try:
        return parse_json(line, place)
    except FileError as error:
        raise ReportError(f"{error}.") from error


def _check_keys(entry: Any, place: str, needed: Mapping[str, type]) -> None:
    if not isinstance(entry, dict):
        raise ReportError(f"{place} is not a JSON object. Correct or remove the line.")
    for key, kind in needed.items():
        value = entry.get(key)
        is_number = kind is float and isinstance(value, int | float) and math.isfinite(value)
        if isinstance(value, bool) or not (is_number or isinstance(value, kind)):
            raise ReportError(f"{place}: {key}={value!r} is invalid: a {kind.__name__} is needed. Correct the line.")


def _parse(line: str, place: str) -> LoggedStep:
    try:
        record = parse_json(line, "it")
        return LoggedStep(int(record["step"]), float(record["time"]), dict(record["metrics"]))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ReportError(f"{place} is not a step record (step, time, metrics): {error!r}.") from error
