"""How a run ends on the driver: well, or with an exception whose message is one sentence about what happened when.

verl passes over skipped updates, metrics that are not finite and rewards that raised. Here every step is held against
that when it is logged, which says so at once, and the run fails at its end. What no later step can mend ends it at once
instead: the exception out of the worker is only given its step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from post_training.process_context import process_context
from post_training.report.faults import REWARD_ERROR, RunFaults
from post_training.report.run_error import RunError, original
from post_training.rewards import counts, failures
from verl_patches.features.measure.run_files import RunFiles
from verl_patches.features.measure.samples import take_samples
from verl_patches.features.training_checkpoint.kept_states import process_kept_states
from verl_patches.features.training_checkpoint.trainer import process_publisher

_RULE_ERROR = "rule_error"


class FaultsOnDriver:
    """The faults of the run that this process drives."""

    def __init__(self, precision: str):
        self.found = RunFaults(precision)

    def logged(self, step: int, metrics: Mapping[str, Any], files: RunFiles) -> None:
        """Take in a step as it is logged; each of its faults is printed and written at once."""
        self._say(step, metrics, files)

    def broken_off(self, step: int, files: RunFiles) -> None:
        """Take in the failures of rewards in a step that will not be logged."""
        self._say(step, {}, files)

    def _say(self, step: int, metrics: Mapping[str, Any], files: RunFiles) -> None:
        rewards = failures.take()
        for kind, clause in self.found.add(step, metrics, rewards).items():
            print(f"warning: {clause}", file=sys.stderr, flush=True)
            files.fault(kind, clause, step, **({"errors": rewards} if kind == REWARD_ERROR else {}))
        # The answers scored 0, as most of their kind would have: a defect to report, and no reason to throw a run away.
        if raised := metrics.get(counts.RULE_ERRORS):
            clause = (
                f"a reward rule raised on {int(raised)} answers at step {step}, which scored 0; report the run's log"
            )
            print(f"warning: {clause}", file=sys.stderr, flush=True)
            files.fault(_RULE_ERROR, clause, step)


def process_faults() -> FaultsOnDriver:
    """Those of the run that goes on in this process."""
    return process_context().find(FaultsOnDriver) or process_context().keep(FaultsOnDriver("bfloat16"))


def record_step(step: int, metrics: Mapping[str, Any], patches: Iterable[str], files: RunFiles) -> None:
    """Write what a step reports and what it was made of, as it is logged. patches: that have been called."""
    if not 0 < step <= process_publisher().previous:  # validated once more by a run that goes on after a step
        files.step(step, metrics)
    files.executed(patches)
    files.samples(step, take_samples())
    process_faults().logged(step, metrics, files)


@contextmanager
def faults_of_run(settings: Any, step: Callable[[], int]) -> Iterator[None]:
    """Watch over the training loop in the block, by the overlay's settings; `step` is asked for its number.

    Raises:
        RunError: the loop came to its end, but the run is not what it looks like; or the loop raised one, which gets
            its step.
    """
    # Experts dealt out by force are other ones in rollout and training, so the gate of float32 says nothing.
    precision = "bfloat16" if settings.router_balance.forced else settings.precision
    faults = process_context().keep(FaultsOnDriver(precision))
    files = RunFiles(settings.measure.output_dir)
    process_kept_states().register("faults", faults.found.state, faults.found.restore)
    with failures.counted():
        try:
            yield
        except Exception as error:
            faults.broken_off(step(), files)
            first = original(error)
            if isinstance(first, RunError):
                raise RunError(f"step {step()}: {first}", first.reason) from error
            raise
    sentence = faults.found.sentence()
    if sentence:
        raise RunError(sentence, "reward_error" if faults.found.reward_errors else "not_valid")
