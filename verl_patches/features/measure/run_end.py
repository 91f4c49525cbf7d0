"""Decides on the driver how a run ends: successfully, or with an exception that says in one sentence what failed when.

verl passes over skipped updates, metrics that are not finite and rewards that raised. Here every step is checked for
these faults when it is logged; they are reported at once, and the run fails at its end. A fault that no later step can
mend ends the run at once instead: the worker's exception only gets the number of its step.
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
        """Check a step that is being logged; print and record each of its faults at once."""
        self._say(step, metrics, files)

    def broken_off(self, step: int, files: RunFiles) -> None:
        """Report failures of rewards in a step that will not be logged."""
        self._say(step, {}, files)

    def _say(self, step: int, metrics: Mapping[str, Any], files: RunFiles) -> None:
        rewards = failures.take()
        for kind, clause in self.found.add(step, metrics, rewards).items():
            print(f"warning: {clause}", file=sys.stderr, flush=True)
            files.fault(kind, clause, step, **({"errors": rewards} if kind == REWARD_ERROR else {}))
        # These answers scored 0, as most of their kind would anyway: a defect to report, but no reason to fail the run.
        if raised := metrics.get(counts.RULE_ERRORS):
            clause = (
                f"a reward rule raised on {int(raised)} answers at step {step}, which scored 0. Report the run's log"
            )
            print(f"warning: {clause}", file=sys.stderr, flush=True)
            files.fault(_RULE_ERROR, clause, step)


def process_faults() -> FaultsOnDriver:
    """Return the faults of the run in this process."""
    return process_context().find(FaultsOnDriver) or process_context().keep(FaultsOnDriver("bfloat16"))


def record_step(step: int, metrics: Mapping[str, Any], patches: Iterable[str], files: RunFiles) -> None:
    """Write the metrics, samples, faults and `patches` (those called so far) of a step when it is logged."""
    if not 0 < step <= process_publisher().previous:  # a resumed run validates its last step again
        files.step(step, metrics)
    files.executed(patches)
    files.samples(step, take_samples())
    process_faults().logged(step, metrics, files)


@contextmanager
def faults_of_run(settings: Any, step: Callable[[], int]) -> Iterator[None]:
    """Collect the faults of the training loop within this context; `step` returns the number of the current step.

    Raises:
        RunError: the loop finished but had faults; or the loop raised a RunError, which gets the number of its step.
    """
    # Forced router balance gives rollout and training different experts, so float32's limit on log-probs means nothing.
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
