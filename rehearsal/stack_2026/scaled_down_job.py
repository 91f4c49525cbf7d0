"""A job of the stack 2026 scaled down to emulated dies for preflight.py: proof of its resume, and its first metrics."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from post_training.report import read_records
from post_training.report.metrics import REWARD, training_steps
from post_training.report.run_folder import METRICS
from rehearsal.scaled_down_job import PLACES, validation_metrics
from rehearsal.stack_2026.jobs import JOBS, scaled_down
from rehearsal.stack_2026.records import LOG_PROB_DIFFERENCE, PROBABILITY_DIFFERENCE_MEAN
from rehearsal.stack_2026.resume_proof import STEPS

FIRST_STEP = (REWARD, "actor/loss", "actor/grad_norm", LOG_PROB_DIFFERENCE, PROBABILITY_DIFFERENCE_MEAN)
"""Metrics by which a first step on other dies is judged."""
OF_MEGATRON = "actor/nonfinite_steps"


@dataclass(frozen=True)
class ScaledDownJob2026:
    """A job of the stack 2026 scaled down to emulated dies.

    Attributes:
        config_name: a file of `verl_plugin/config`.
        overrides: the job's own, without sizes and places.
        folder: for all output; the run that is not killed is in `unbroken`.
    """

    config_name: str
    overrides: tuple[str, ...]
    folder: Path

    @classmethod
    def of_job(cls, config_name: str, given: Sequence[str], folder: Path) -> ScaledDownJob2026:
        """Scale down a job with these overrides."""
        job = JOBS.get(config_name)
        own = {_key(word) for word in scaled_down(job, STEPS, seed=1, dies=job.dies)} if job else set()
        kept = tuple(word for word in given if _key(word) not in own | set(PLACES))
        return cls(config_name, kept, folder)

    @property
    def run(self) -> Path:
        """The run that was not killed."""
        return self.folder / "unbroken"

    def proof(self) -> list[str]:
        """Return the command that trains, kills, resumes and compares; the last step validates."""
        command = [sys.executable, "-m", "rehearsal.stack_2026.resume_proof", "--job", self.config_name]
        return [*command, "--output", str(self.folder), "--", *self.overrides, f"trainer.test_freq={STEPS}"]

    def validated(self) -> dict[str, Any]:
        """Return the metrics of the last step's validation."""
        return validation_metrics(self.run, STEPS)

    def first_step(self) -> dict[str, float | None]:
        """Return metrics of the first step; None for one that is missing or not finite."""
        steps = training_steps(read_records(self.run / METRICS))
        names = (*FIRST_STEP, OF_MEGATRON) if JOBS[self.config_name].backend == "megatron" else FIRST_STEP
        return {name: steps[0].metrics.get(name) if steps else None for name in names}


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]
