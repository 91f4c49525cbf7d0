"""Loaded by VERL_USE_EXTERNAL_MODULES: verl's trainer writes down its weight updates and its optimizer steps, in order.

verl logs the mean over all optimizer steps between two weight updates. UPDATES_FILE gets a line with a JSON object for
each weight update (`weights`, the version, and `backend`) and each optimizer step (its metrics).
"""

import json
import os
from numbers import Real
from pathlib import Path
from typing import Any

from verl.checkpoint_engine import CheckpointEngineManager
from verl.trainer.ppo.v1.utils import MetricsAggregator

_update_weights = CheckpointEngineManager.update_weights
_add_step_metrics = MetricsAggregator.add_step_metrics


def _note(entry: dict[str, Any]) -> None:
    with Path(os.environ["UPDATES_FILE"]).open("a") as file:
        file.write(json.dumps(entry) + "\n")


def _noted_weights(self: CheckpointEngineManager, global_steps: int | None = None) -> Any:
    result = _update_weights(self, global_steps)
    _note({"weights": global_steps, "backend": self.backend})
    return result


def _noted_step(self: MetricsAggregator, metrics: dict[str, Any], sample_count: int = 0) -> None:
    _add_step_metrics(self, metrics, sample_count)
    if sample_count:  # 0 for what precedes the first optimizer step
        _note({name: float(value) for name, value in metrics.items() if isinstance(value, Real)})


CheckpointEngineManager.update_weights = _noted_weights
MetricsAggregator.add_step_metrics = _noted_step
