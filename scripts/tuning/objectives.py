"""What a search measures: tokens a second or the reward of runs, or the seconds of a step on paper."""

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
    """The value of a run of the subject's command, which makes `steps` steps in a folder of its own below `folder`."""

    subject: Subject
    folder: Path
    steps: int
    signals: SignalFlag
    unit: str
    value_of: Callable[[Path], float]
    direction: Literal["maximize"] = "maximize"

    def measure(self, settings: Settings, trial: optuna.Trial) -> float:
        """Run and read.

        Raises:
            TrialFailed: the run failed, or has not written what is measured.
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
    """Of prompts and responses, of the whole job: the mean of all steps but the first, which also compiles.

    Seconds of saving and validation do not count: settings do not change them, and not every trial has as many.
    """
    rate = rates(read_run(folder).statistics, 1).trained
    return float("nan") if rate is None else rate


def reward(folder: Path) -> float:
    """The mean reward of the last steps."""
    found = [record.metrics.get(REWARD) for record in training_steps(_records(folder))[-REWARD_WINDOW:]]
    return fmean(float("nan") if value is None else value for value in found)


def _records(folder: Path) -> list[Any]:
    return read_records(folder / METRICS)


@dataclass(frozen=True)
class Modelled:
    """The seconds of a step that the plan works out: nothing is started, and nothing was measured.

    prompt_tokens, response_tokens: means of a sequence; None takes the longest that is allowed.
    """

    subject: Subject
    cluster: Cluster
    prompt_tokens: float
    response_tokens: float | None
    direction: Literal["minimize"] = "minimize"
    unit: str = "modelled s"

    def measure(self, settings: Settings, trial: optuna.Trial) -> float:
        """Work it out. Raises TrialFailed where the model has no formula."""
        try:
            config, swaps = self.subject.configuration(settings)
            model = cast(Mapping[str, Any], self.subject.model)
            longest = config["data"]["max_response_length"]
            lengths = self.prompt_tokens, longest if self.response_tokens is None else self.response_tokens
            step = step_job(config, read_job(config, model, swaps), model, self.cluster, *lengths)
            return sum(step_seconds(step, self.cluster).values())
        except ValueError as error:
            raise TrialFailed(str(error)) from error
