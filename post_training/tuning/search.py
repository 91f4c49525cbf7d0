"""Search with Optuna: rejected settings are never started, and a search that was ended can be continued.

Optuna's study in a SQLite file holds every trial. A trial whose process is killed is started again by the next process
that opens the study. Beside Optuna's state a trial has an `outcome`, and a sentence that explains it:

    measured       it ran, and has a value
    refused        the plan or a check of the configuration says why it cannot run; nothing was started
    stopped early  it ran, and was slower than the median of the others at the same step
    failed         it ran, and failed, or its value is no number
    repeated       Optuna proposed known settings again; it has their value, and does not count
"""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from post_training.tuning.space import Settings, Space, SpaceError, overrides

MEASURED, REFUSED, STOPPED, FAILED, REPEATED = "measured", "refused", "stopped early", "failed", "repeated"
OUTCOME, SENTENCE, SETTINGS = "outcome", "sentence", "settings"
DATABASE = "study.db"
_ASKED = "asked"
# Known proposals in a row that end a search: the space is exhausted, or the sampler has settled.
_MOST_REPEATED = 25
# Random trials before Optuna's model proposes: all divided by the first number, and at most the second.
_DRAWN_SHARE, _MOST_DRAWN = 4, 10


class TrialFailed(Exception):
    """A trial ran and failed; the message is one sentence."""


class Objective(Protocol):
    """The quantity that a search maximizes or minimizes."""

    @property
    def direction(self) -> Literal["maximize", "minimize"]: ...

    @property
    def unit(self) -> str: ...

    def measure(self, settings: Settings, trial: Trial) -> float:
        """Measure the value of some settings.

        Raises:
            TrialFailed: they ran and failed.
            optuna.TrialPruned: they ran, and `trial.should_prune()` stopped them.
        """
        ...


@contextmanager
def opened(folder: Path, objective: Objective, trials: int, seed: int, asked: Mapping[str, str]) -> Iterator[Any]:
    """Open the study in a folder, for this process alone.

    Args:
        asked: the options that define the search; a folder can only be continued with the same ones.

    Raises:
        SpaceError: another process searches there, or something else was searched.
    """
    from sqlalchemy.engine import URL

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with (folder / "study.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SpaceError(
                f"--output={folder} is invalid: another process searches there. Choose another folder."
            ) from error
        storage = URL.create("sqlite", database=str(folder / DATABASE)).render_as_string()
        study = optuna.create_study(
            storage=storage,
            study_name="tune",
            direction=objective.direction,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1),
            load_if_exists=True,
        )
        drawn = min(_MOST_DRAWN, max(1, trials // _DRAWN_SHARE))
        # A continued search takes another seed: the same one would propose the same trials.
        study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials), n_startup_trials=drawn)
        before = study.user_attrs.get(_ASKED, dict(asked))
        if different := [name for name in asked if before.get(name) != asked[name]]:
            raise SpaceError(
                f"--output={folder} is invalid: it contains a search with another {different[0]} "
                f"({before.get(different[0])}). Choose another folder."
            )
        study.set_user_attr(_ASKED, dict(asked))
        yield study


@dataclass(frozen=True)
class Search:
    """A search over a space.

    Attributes:
        refusal: returns why settings are rejected, as a sentence; None if they can run.
        objective: measures the others.
        trials: number of trials that count.
    """

    space: Space
    refusal: Callable[[Settings], str | None]
    objective: Objective
    trials: int

    def carry_out(self, study: optuna.Study, shown: Callable[[FrozenTrial], None] = lambda trial: None) -> None:
        """Run trials until `trials` of this and earlier processes count, or nothing new is proposed."""
        _begin_again(study)
        repeated = 0
        while counted(study) < self.trials and repeated < _MOST_REPEATED:
            trial = study.ask()
            self._try(study, trial)
            ended = study.get_trials(deepcopy=False)[trial.number]
            repeated = repeated + 1 if outcome_of(ended) == REPEATED else 0
            shown(ended)

    def _try(self, study: optuna.Study, trial: Trial) -> None:
        settings = {key: value for each in self.space for key, value in each.suggest(trial).items()}
        trial.set_user_attr(SETTINGS, overrides(settings))
        if known := _known(study, overrides(settings)):
            value = known.value if known.state == TrialState.COMPLETE else None
            return _tell(study, trial, REPEATED, f"as trial {known.number}", value)
        if sentence := self.refusal(settings):
            return _tell(study, trial, REFUSED, sentence)
        try:
            value = self.objective.measure(settings, trial)
        except TrialFailed as error:
            return _tell(study, trial, FAILED, str(error))
        except optuna.TrialPruned as error:
            return _tell(study, trial, STOPPED, str(error))
        if not math.isfinite(value):
            return _tell(study, trial, FAILED, f"its {self.objective.unit} are {value}")
        return _tell(study, trial, MEASURED, "", value)


def propose_configured(study: optuna.Study, space: Space, config: Mapping[str, Any]) -> None:
    """Make a new study begin with the values of a configuration, so that the best is never worse than they are."""
    params = {each.name: value for each in space if (value := each.configured(config)) is not None}
    if not study.trials:
        study.enqueue_trial(params)


def counted(study: optuna.Study) -> int:
    """Count the trials that ended, except those that repeat another and those whose process was killed."""
    return sum(outcome_of(trial) not in (None, REPEATED) for trial in study.get_trials(deepcopy=False))


def outcome_of(trial: FrozenTrial) -> str | None:
    """Return how a trial ended; None while it runs, and if its process was killed."""
    return trial.user_attrs.get(OUTCOME) if trial.state.is_finished() else None


def best_of(study: optuna.Study) -> FrozenTrial | None:
    """Return the best trial that was measured."""
    measured = [trial for trial in study.get_trials(deepcopy=False) if outcome_of(trial) == MEASURED]
    best = max if study.direction == optuna.study.StudyDirection.MAXIMIZE else min
    return best(measured, key=lambda trial: trial.value or 0.0, default=None)


def _begin_again(study: optuna.Study) -> None:
    """Enqueue the trials again whose process was killed. A kill in between enqueues one twice; the second then counts
    as a repetition."""
    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        study.enqueue_trial(trial.params)
        study.tell(trial.number, state=TrialState.FAIL)


def _known(study: optuna.Study, settings: list[str]) -> FrozenTrial | None:
    for trial in study.get_trials(deepcopy=False):
        if outcome_of(trial) not in (None, REPEATED) and trial.user_attrs.get(SETTINGS) == settings:
            return trial
    return None


def _tell(study: optuna.Study, trial: Trial, outcome: str, sentence: str, value: float | None = None) -> None:
    """End a trial. One without a value counts as worse than all others, so that the sampler keeps away from it."""
    trial.set_user_attr(OUTCOME, outcome)
    trial.set_user_attr(SENTENCE, sentence)
    if value is None:
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, value)


def describe_asked(space: Space, **others: object) -> dict[str, str]:
    """Describe the space and the other options of a search as texts that can be compared."""
    spaces = {each.name: each.written() for each in space}
    return {name: str(value) for name, value in others.items()} | {"space": json.dumps(spaces)}
