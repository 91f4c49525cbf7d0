"""The objectives of a search: tokens per second or reward of runs, or the seconds of a step in the plan's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, cast

import optuna

from post_training.plan.job import read_job
from post_training.plan.step_time.configured import step_job
from post_training.plan.step_time.job import Cluster
from post_training.plan.step_time.model import step_seconds
from post_training.processes.command import SignalFlag, run_to_the_end
from post_training.processes.logs import last_error
from post_training.report import ReportError
from post_training.report.metrics import REWARD, read_records, training_steps
from post_training.report.rates import rates
from post_training.report.run_folder import METRICS, read_run
from post_training.report.summary import REWARD_WINDOW
from post_training.tuning.search import TrialFailed
from post_training.tuning.space import Settings
from scripts.tuning.subject import Subject


@dataclass(frozen=True)
class OfRuns:
    """An objective measured in runs of the subject's command, each of `steps` steps in its own folder in `folder`."""

    subject: Subject
    folder: Path
    steps: int
    signals: SignalFlag
    unit: str
    value_of: Callable[[Path], float]
    direction: Literal["maximize"] = "maximize"

    def measure(self, settings: Settings, trial: optuna.Trial) -> float:
        """Run the command and read its value.

        Raises:
            TrialFailed: the run failed, or has not written the value.
            optuna.TrialPruned: it was behind the others, and was ended.
            Interrupted: a signal ended it.
        """
        folder = self.folder / f"{trial.number:04}"
        log, seen = folder.with_suffix(".log"), 0

        def look() -> None:
            nonlocal seen
            reached = len(training_steps(_records(folder)))
            if seen < reached < self.steps:
                seen = reached
                trial.report(self.value_of(folder), reached)
                if trial.should_prune():
                    raise optuna.TrialPruned(f"ended after {reached} of {self.steps} steps")

        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            code = run_to_the_end(
                self.subject.run(folder, self.steps, settings), {}, Path.cwd(), log, self.signals, look
            )
            if code != 0:
                raise TrialFailed(last_error(log))
            return self.value_of(folder)
        except (ReportError, OSError) as error:
            raise TrialFailed(str(error)) from error


def tokens_a_second(folder: Path) -> float:
    """Return the whole job's mean tokens per second, of prompts and responses, without the first step, which compiles.
    Seconds of saving and validation do not count: settings do not change them, and trials differ in how many they have.
    """
    rate = rates(read_run(folder).statistics, 1).trained
    return float("nan") if rate is None else rate


def reward(folder: Path) -> float:
    """Return the mean reward of the last steps."""
    found = [record.metrics.get(REWARD) for record in training_steps(_records(folder))[-REWARD_WINDOW:]]
    return fmean(float("nan") if value is None else value for value in found)


def _records(folder: Path) -> list[Any]:
    return read_records(folder / METRICS)


@dataclass(frozen=True)
class Modelled:
    """An objective computed by the plan, the seconds of a step: nothing is started or measured.

    Attributes:
        prompt_tokens, response_tokens: means per sequence; for the response, None takes the longest one allowed.
    """

    subject: Subject
    cluster: Cluster
    prompt_tokens: float
    response_tokens: float | None
    direction: Literal["minimize"] = "minimize"
    unit: str = "modelled s"

    def measure(self, settings: Settings, trial: optuna.Trial) -> float:
        """Compute the seconds of a step. Raises TrialFailed if the plan's model has no formula for the job."""
        try:
            config, swaps = self.subject.configuration(settings)
            model = cast(Mapping[str, Any], self.subject.model)
            longest = config["data"]["max_response_length"]
            lengths = self.prompt_tokens, longest if self.response_tokens is None else self.response_tokens
            step = step_job(config, read_job(config, model, swaps), model, self.cluster, *lengths)
            return sum(step_seconds(step, self.cluster).values())
        except ValueError as error:
            raise TrialFailed(str(error)) from error
