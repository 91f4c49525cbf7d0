"""The results of a search: a table, the best settings as a file, and Optuna's plots."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial

from post_training.checkpoint.durable import write_text_durably
from post_training.tuning.search import FAILED, MEASURED, REFUSED, SENTENCE, SETTINGS, STOPPED, best_of, outcome_of

BEST = "best.yaml"
_SHOWN_TRIALS, _SHOWN_SENTENCES = 10, 5


def short(settings: list[str]) -> str:
    """Format settings with the last part of their keys, or the last two parts where the last one is not unique."""
    pairs = [(key.split("."), value) for key, _, value in (each.partition("=") for each in settings)]
    last = [key[-1] for key, _ in pairs]
    return " ".join(f"{'.'.join(key[-1 - (last.count(key[-1]) > 1) :])}={value}" for key, value in pairs)


def line(trial: FrozenTrial) -> str:
    """Format a trial that has ended in one line."""
    value = f"{trial.value:13.6g}" if outcome_of(trial) == MEASURED else f"{outcome_of(trial):>13}"
    sentence = trial.user_attrs.get(SENTENCE, "")
    return f"{trial.number:5} {value}  {short(trial.user_attrs[SETTINGS])}{f': {sentence}' if sentence else ''}"


def table(study: optuna.Study, unit: str) -> str:
    """Format the best trials, and the reasons why others have no value."""
    trials = study.get_trials(deepcopy=False)
    by_outcome: dict[str | None, list[FrozenTrial]] = defaultdict(list)
    for trial in trials:
        by_outcome[outcome_of(trial)].append(trial)
    falling = study.direction == optuna.study.StudyDirection.MAXIMIZE
    measured = sorted(by_outcome[MEASURED], key=lambda trial: trial.value or 0.0, reverse=falling)
    lines = [f"trial {unit:>13.13}  settings", *map(line, measured[:_SHOWN_TRIALS])]
    counts = [f"{len(by_outcome[each])} {each}" for each in (MEASURED, REFUSED, STOPPED, FAILED) if by_outcome[each]]
    lines.append(", ".join(counts) or "no trial has ended")
    for outcome in (REFUSED, FAILED):
        sentences: dict[str, int] = defaultdict(int)
        for trial in by_outcome[outcome]:
            sentences[trial.user_attrs[SENTENCE]] += 1
        often = sorted(sentences.items(), key=lambda item: -item[1])
        lines += [f"{outcome} {number}x: {sentence}" for sentence, number in often[:_SHOWN_SENTENCES]]
    return "\n".join(lines)


def write_best(study: optuna.Study, unit: str, folder: Path) -> FrozenTrial | None:
    """Write `best.yaml`, a list of overrides, and return the best trial; write nothing if none was measured."""
    import yaml

    best = best_of(study)
    if best is not None:
        head = f"# Trial {best.number}: {best.value:g} {unit}. Overrides for a launcher, after --.\n"
        write_text_durably(folder / BEST, head + yaml.safe_dump(best.user_attrs[SETTINGS], width=math.inf))
    return best


def draw(study: optuna.Study, unit: str, folder: Path) -> list[str]:
    """Write Optuna's plots as PNG files and return their names. A plot that needs more trials is left out."""
    import warnings

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from optuna.visualization import matplotlib as plots

    drawn = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about experimental features, and axes with one value
        for name in ("optimization_history", "param_importances", "slice"):
            try:
                getattr(plots, f"plot_{name}")(study, target_name=unit)
            except (ValueError, RuntimeError):  # too few trials, or all of one value
                pyplot.close("all")
                continue
            pyplot.savefig(folder / f"{name}.png", dpi=120, bbox_inches="tight")
            pyplot.close("all")
            drawn.append(f"{name}.png")
    return drawn
