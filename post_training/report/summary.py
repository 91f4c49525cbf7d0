"""Summarises a run in numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from post_training.report.faults import NOT_ANSWERING, RAY_ENDED, REWARD_ERROR, RunFaults
from post_training.report.metrics import (
    AGREEMENTS,
    ALLOCATED_BYTES_PREFIX,
    COLLECTIVES_PREFIX,
    DATA_COLLECTIVES,
    DECODE_STEPS,
    DRIVER_BYTES,
    EXPERT_SETS_COMPARED,
    EXPERT_SETS_DIFFER,
    GENERATED_PROMPTS,
    GROUPS_WITH_GRADIENT,
    LOGPROB_DIFFERENCE,
    PEAK_BYTES_PREFIX,
    PHASES,
    REWARD,
    SKIPPED_UPDATES,
    SLOT_STEPS,
    SLOT_STEPS_BOUND,
    STAGES,
    START_SKEW_PREFIX,
    STEP_SECONDS,
    TRAINED_PROMPTS,
    TRUNCATED_SHARE,
    VALUES_CHANGED_BY_CASTS,
    WEIGHTS_EXACT,
    LoggedStep,
    training_steps,
)

# Rewards of single steps are noisy: the first and the last reward are means over this many steps.
REWARD_WINDOW = 5


@dataclass(frozen=True)
class RunFacts:
    """Facts that are not in the run's metrics.

    Attributes:
        precision: the weights' data type, which decides how close rollout and training log-probs can be.
        wall_s, startup_s: seconds from the user's command to its end and to the first step.
        startup_events: seconds from the command to each event of the startup.
    """

    seed: int
    dies: int
    wall_s: float
    precision: str
    startup_s: float | None = None
    startup_events: Mapping[str, float] = field(default_factory=dict)


def summarise(
    records: Sequence[LoggedStep],
    facts: RunFacts,
    overlay: Mapping[str, Any] | None = None,
    emulator: Mapping[str, Any] | None = None,
    faults: Sequence[Mapping[str, Any]] = (),
    failure: str | None = None,
) -> dict[str, Any]:
    """Return the summary of a run as JSON-ready values; a quantity that was not measured is None, never 0.

    A failed run has a summary of the steps that it finished. Some of its entries:

    - ``expert_sets_differ``: a step's highest share of tokens x layers with different experts in rollout and training;
      ``expert_sets_compared``: how many of them were compared in the run.
    - ``groups_with_gradient``: share of trained groups whose rewards differ, a mean over the last steps.
    - ``generated_prompts``, ``trained_prompts``: totals of the run; ``truncated_share``: of the trained answers.
    - ``stage_seconds``, ``step_seconds`` of whole steps, ``step_seconds_training`` without saving and validation,
      ``driver_bytes_per_sample``, which the driver serializes for workers, and ``start_skew_s`` by stage: means over
      all steps except the first, which also compiles (over the first if it is the only one).

    overlay: its report (applied, pending, effective) with the patches that ran (executed). emulator: meters of the
    emulated NPU, which count every collective. faults: of faults.jsonl. failure: the message that ended the run.
    """
    records = training_steps(records)
    rewards = _values(records, REWARD)
    steady = records[1:] or records
    counted = _collectives(records)
    return {
        **asdict(facts),
        "failure": failure,
        "steps": len(records),
        "updates_skipped": _total([value for name in SKIPPED_UPDATES for value in _values(records, name)]),
        "nonfinite_metrics": _nonfinite(records),
        "not_answering": _stops(faults),
        "ray_ended": next((fault["message"] for fault in faults if fault["kind"] == RAY_ENDED), None),
        "reward_errors": sum(len(fault["errors"]) for fault in faults if fault["kind"] == REWARD_ERROR),
        "reward_first": _mean(rewards[:REWARD_WINDOW]),
        "reward_last": _mean(rewards[-REWARD_WINDOW:]),
        "groups_with_gradient": _mean(_values(records, GROUPS_WITH_GRADIENT)[-REWARD_WINDOW:]),
        "generated_prompts": _total(_values(records, GENERATED_PROMPTS)),
        "trained_prompts": _total(_values(records, TRAINED_PROMPTS)),
        "truncated_share": _mean(_values(records, TRUNCATED_SHARE)),
        "step_seconds": _mean(_values(steady, STEP_SECONDS)),
        "step_seconds_training": _mean(_known(record.training_seconds() for record in steady)),
        "stage_seconds": _mean_stages(steady),
        **_agreement(records),
        **_patches(overlay),
        "device_memory": _memory_timeline(records) or None,
        "peak_device_bytes": _peaks(records) or (emulator or {}).get("peak_device_bytes"),
        "collectives": (emulator or {}).get("collectives") or counted or None,
        "overlay_collectives": counted or None,
        "agreements": _total(_values(records, AGREEMENTS)),
        "decode_steps": _total(_values(records, DECODE_STEPS)),
        "slot_steps": _total(_values(records, SLOT_STEPS)),
        "slot_steps_bound": _total(_values(records, SLOT_STEPS_BOUND)),
        "data_collectives": _total(_values(records, DATA_COLLECTIVES)),
        "driver_bytes_per_sample": _mean(_values(steady, DRIVER_BYTES)),
        "start_skew_s": _mean_skews(steady) or None,
        "emulator": dict(emulator) if emulator else None,
    }


def _agreement(records: Sequence[LoggedStep]) -> dict[str, Any]:
    """Summarise the agreement of rollout and training: log-probs, experts and weights."""
    return {
        "rollout_logprob_diff_max": _highest(records, LOGPROB_DIFFERENCE),
        "expert_sets_differ": _highest(records, EXPERT_SETS_DIFFER),
        "expert_sets_compared": _total(_values(records, EXPERT_SETS_COMPARED)),
        "weights_exact": _all_true(_values(records, WEIGHTS_EXACT)),
        "values_changed_by_casts": _total(_values(records, VALUES_CHANGED_BY_CASTS)),
    }


def _patches(overlay: Mapping[str, Any] | None) -> dict[str, int | None]:
    """Return the numbers of patches that were applied, are effective and ran, from the overlay's report."""
    return {
        "patches_applied": None if overlay is None else len(overlay["applied"]),
        "patches_effective": None if overlay is None else sum(map(bool, overlay["effective"].values())),
        "patches_executed": None if overlay is None else len(overlay.get("executed", ())),
    }


def moving_means(values: Sequence[float], window: int) -> list[float]:
    """Return for each value the mean of it and up to ``window - 1`` values before it."""
    return [sum(values[max(0, end - window) : end]) / min(end, window) for end in range(1, len(values) + 1)]


def _values(records: Iterable[LoggedStep], name: str) -> list[float]:
    """Return the finite values of a metric; a step whose value was not finite has None."""
    return [value for record in records if (value := record.metrics.get(name)) is not None]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _total(values: Sequence[float]) -> int | None:
    return int(sum(values)) if values else None


def _nonfinite(records: Iterable[LoggedStep]) -> dict[str, list[int]]:
    """Return, by metric, the steps at which it was not finite."""
    found = RunFaults("")
    for record in records:
        found.add(record.step, record.metrics)
    return found.nonfinite


def _stops(faults: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each hung process once; it is logged when it is reported, and again if the run stops because of it."""
    stops: list[dict[str, Any]] = []
    for fault in faults:
        if fault["kind"] == NOT_ANSWERING:
            stop = {key: fault[key] for key in ("rank", "phase", "step", "seconds", "waiting", "ended")}
            if stops and stop["ended"] and stops[-1]["rank"] == stop["rank"]:
                stops.pop()
            stops.append(stop)
    return stops


def _highest(records: Iterable[LoggedStep], name: str) -> float | None:
    """Return the highest value over steps; None if nothing was measured or a value was not finite."""
    values = [record.metrics[name] for record in records if name in record.metrics]
    finite = [value for value in values if value is not None]
    return max(finite, default=None) if len(finite) == len(values) else None


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _mean_stages(records: Sequence[LoggedStep]) -> dict[str, float | None]:
    stages = [record.stage_seconds() for record in records]
    return {name: _mean([value for seconds in stages if (value := seconds[name]) is not None]) for name in STAGES}


def _mean_skews(records: Sequence[LoggedStep]) -> dict[str, float | None]:
    """Return, by stage, the mean seconds from its first start on a rank to its last."""
    names = sorted({name for record in records for name in record.metrics if name.startswith(START_SKEW_PREFIX)})
    return {name.removeprefix(START_SKEW_PREFIX): _mean(_values(records, name)) for name in names}


def _all_true(values: Sequence[float]) -> bool | None:
    return all(values) if values else None


def _peaks(records: Iterable[LoggedStep]) -> dict[str, int]:
    """Return the highest device bytes by phase over steps; the run's metric is already the highest over dies."""
    peaks: dict[str, int] = {}
    for record in records:
        for name, value in record.metrics.items():
            if name.startswith(PEAK_BYTES_PREFIX) and value is not None:
                phase = name.removeprefix(PEAK_BYTES_PREFIX)
                peaks[phase] = max(peaks.get(phase, 0), int(value))
    return peaks


def _memory_timeline(records: Sequence[LoggedStep]) -> list[dict[str, str | int]]:
    """Return the device bytes of the last step by phase, in order: the peak of the phase, and the bytes at its end."""
    metrics = records[-1].metrics if records else {}
    timeline: list[dict[str, str | int]] = []
    for phase in PHASES:
        peak, end = metrics.get(PEAK_BYTES_PREFIX + phase), metrics.get(ALLOCATED_BYTES_PREFIX + phase)
        if peak is not None and end is not None:
            timeline.append({"phase": phase, "peak_bytes": int(peak), "end_bytes": int(end)})
    return timeline


def _collectives(records: Iterable[LoggedStep]) -> dict[str, dict[str, int]]:
    """Sum the counted collectives by kind over steps; each value has some of the keys count and bytes."""
    totals: dict[str, dict[str, int]] = {}
    for record in records:
        for name, value in record.metrics.items():
            kind, _, quantity = name.removeprefix(COLLECTIVES_PREFIX).rpartition("/")
            if name.startswith(COLLECTIVES_PREFIX) and kind and value is not None:
                total = totals.setdefault(kind, {})
                total[quantity] = total.get(quantity, 0) + int(value)
    return totals
