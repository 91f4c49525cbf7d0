"""Converts the metrics of verl's file logger to the records that the reports read."""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from post_training.report.metrics import read_entries, read_records

# verl compares probabilities, which are at most as far apart as their logarithms.
PROBABILITY_DIFFERENCE = "training/rollout_probs_diff_max"
PROBABILITY_DIFFERENCE_MEAN = "training/rollout_probs_diff_mean"
# Mean over answers of the distance between an answer's mean log-prob in the rollout and in training. If weights do not
# arrive, these differ, while probabilities are all close to 0. Single tokens have no limit, because of DeepSeek-V3:
# docs/upstream/vllm-ascend-mla-prefill-type.md.
LOG_PROB_DIFFERENCE = "rollout_corr/log_ppl_abs_diff"
_TOKENS = ("perf/total_num_tokens", "prompt_length/mean", "response_length/mean")
# Stages that the reports know by another name than verl has for them.
_RENAMED = {"timing_s/update_weights": "timing_s/reshard"}
# verl puts this before every metric that the update returns.
_OF_UPDATE = "actor/"
# Metrics of the update that concern the whole step.
_OF_STEP = ("rollout/", "memory/")


class RecordWriter:
    """Appends a record for every step that verl has logged after the last recorded one.

    Args:
        source: the file of verl's logger: one object a line with `step` and `data`.
        target: the records: one object a line with `step`, `time` and `metrics`. A resumed run keeps its records.
        clock: returns Unix seconds; a step's time is when it was first seen, since verl's lines have none.
    """

    def __init__(self, source: Path, target: Path, clock: Callable[[], float] = time.time) -> None:
        self._source = source
        self._target = target
        self._clock = clock
        done = read_records(target)
        self._last = done[-1].step if done else -1

    def update(self) -> None:
        """Append the new records.

        Raises:
            ReportError: a line of the source is not a record of a step.
        """
        entries = read_entries(self._source, step=int, data=dict)
        new = [entry for entry in entries if entry["step"] > self._last]
        with self._target.open("a") as file:
            for entry in new:
                record = {"step": entry["step"], "time": self._clock(), "metrics": _numbers(entry["data"])}
                file.write(json.dumps(record) + "\n")
        self._last = new[-1]["step"] if new else self._last


def answers_of(metrics: Mapping[str, float | None]) -> int | None:
    """Return the number of answers that a step was trained on, which verl does not log; None if a metric is missing.

    It is the number of all tokens divided by the mean tokens of a prompt and its response.
    """
    tokens, prompt, response = (metrics.get(name) for name in _TOKENS)
    return None if not tokens or not prompt or not response else round(tokens / (prompt + response))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics that are numbers; None for one that is not finite."""
    kept = {_record_name(name): value for name, value in metrics.items() if isinstance(value, int | float)}
    return {name: value if math.isfinite(value) else None for name, value in kept.items()}


def _record_name(name: str) -> str:
    """Return the reports' name for a metric of verl."""
    bare = name.removeprefix(_OF_UPDATE)
    return bare if bare.startswith(_OF_STEP) else _RENAMED.get(name, name)
