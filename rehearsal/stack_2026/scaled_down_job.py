"""A job of the stack 2026 scaled down to emulated dies for preflight.py.

Its resume is proved, its first step and its validation are read, and its last checkpoint is exported and evaluated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from post_training.evaluation.results import GREEDY
from post_training.report import read_records
from post_training.report.metrics import REWARD, training_steps
from post_training.report.run_folder import METRICS, at, read_configuration
from rehearsal.scaled_down_job import PLACES, TrainedJob
from rehearsal.stack_2026.jobs import JOBS, scaled_down
from rehearsal.stack_2026.records import LOG_PROB_DIFFERENCE, PROBABILITY_DIFFERENCE_MEAN
from rehearsal.stack_2026.resume_proof import STEPS

FIRST_STEP = (REWARD, "actor/loss", "actor/grad_norm", LOG_PROB_DIFFERENCE, PROBABILITY_DIFFERENCE_MEAN)
"""Metrics by which a first step on other dies is judged."""
OF_MEGATRON = "actor/nonfinite_steps"
_SAMPLING = "actor_rollout_ref.rollout.val_kwargs"
# The last step validates with one greedy answer for each problem, as evaluate.py answers them.
_VALIDATES = (
    f"trainer.test_freq={STEPS}",
    f"{_SAMPLING}.do_sample=false",
    f"{_SAMPLING}.temperature=0",
    f"{_SAMPLING}.n=1",
)
_SCORE = "/reward/mean@1"


@dataclass(frozen=True)
class ScaledDownJob2026(TrainedJob):
    """A job of the stack 2026 scaled down to emulated dies.

    Attributes:
        config_name: a file of `verl_plugin/config`.
        overrides: the job's own, without sizes and places.
        folder: for all output; the run that is not killed is in `unbroken`.
    """

    config_name: str
    overrides: tuple[str, ...]
    folder: Path

    stack = "2026"
    last_step = STEPS
    reward_key = "reward.custom_reward_function"

    @classmethod
    def of_job(cls, config_name: str, given: Sequence[str], folder: Path) -> ScaledDownJob2026:
        """Scale down a job with these overrides."""
        job = JOBS.get(config_name)
        own = {_key(word) for word in scaled_down(job, STEPS, seed=1, dies=job.dies)} if job else set()
        kept = tuple(word for word in given if _key(word) not in own | set(PLACES))
        return cls(config_name, kept, folder)

    @property
    def questions(self) -> Path:
        """As in `TrainedJob`."""
        return self.run / "data" / "test.parquet"

    def proof(self) -> list[str]:
        """Return the command that trains, kills, resumes and compares; the last step validates greedily."""
        command = [sys.executable, "-m", "rehearsal.stack_2026.resume_proof", "--job", self.config_name]
        return [*command, "--output", str(self.folder), "--", *self.overrides, *_VALIDATES]

    def _more(self, config: Mapping[str, Any]) -> list[str]:
        # On as many dies as in the run: with others, sums are rounded elsewhere.
        return ["--tensor-parallel", str(at(config, "actor_rollout_ref.rollout.tensor_model_parallel_size"))]

    def scores(self) -> tuple[float, float] | None:
        """Return the mean score of the evaluation's greedy answers, and that of the run's validation.

        None if the reward takes arguments, which evaluate.py does not hand on.

        Raises:
            ValueError: the validation has no score, or several.
        """
        if at(read_configuration(self.run), f"{self.reward_key}.reward_kwargs"):
            return None
        validated = [value for name, value in self.validated().items() if name.endswith(_SCORE)]
        if len(validated) != 1:
            raise ValueError(f"the last step has {len(validated)} metrics {_SCORE} of a validation; see {self.run}")
        questions = json.loads((self.evaluated / "evaluation.json").read_text())["questions"]
        (model,) = questions[0]["answers"]
        return fmean(each["answers"][model][GREEDY]["score"] for each in questions), validated[0]

    def first_step(self) -> dict[str, float | None]:
        """Return metrics of the first step; None for one that is missing or not finite."""
        steps = training_steps(read_records(self.run / METRICS))
        names = (*FIRST_STEP, OF_MEGATRON) if JOBS[self.config_name].backend == "megatron" else FIRST_STEP
        return {name: steps[0].metrics.get(name) if steps else None for name in names}


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]
