"""Searches over objectives with a known optimum, and the results kept when a search is killed."""

import math
from types import SimpleNamespace

import optuna
import pytest

from post_training.tuning.results import draw, line, short, table, write_best
from post_training.tuning.search import (
    FAILED,
    MEASURED,
    REFUSED,
    REPEATED,
    SENTENCE,
    SETTINGS,
    STOPPED,
    Search,
    TrialFailed,
    best_of,
    counted,
    describe_asked,
    opened,
    outcome_of,
    propose_configured,
)
from post_training.tuning.space import Choice, Range, SpaceError

SPACE = (
    Choice("size", tuple({"size": value} for value in (1, 2, 4, 8, 16))),
    Range("share", 0.1, 0.9, 0.1),
    Choice("layout", ({"tp": 1, "pp": 4}, {"tp": 2, "pp": 2}, {"tp": 4, "pp": 1})),
)


def objective(measure, direction="maximize"):
    return SimpleNamespace(direction=direction, unit="tokens/s", measure=measure)


def speed(settings, trial=None):
    """Return a trial's speed, which is highest at size 8, share 0.6 and TP2 x PP2."""
    size, share = math.log2(settings["size"]), settings["share"]
    return 100 - 10 * (size - 3) ** 2 - 200 * (share - 0.6) ** 2 - 15 * (settings["tp"] != 2)


def search(folder, measure=speed, refusal=lambda settings: None, trials=12, seed=0, asked=None):
    with opened(folder, objective(measure), trials, seed, asked or {"space": "of the test"}) as study:
        Search(SPACE, refusal, objective(measure), trials).carry_out(study)
        return study


def of(study, outcome):
    return [trial for trial in study.trials if outcome_of(trial) == outcome]


def test_what_rejected_is_not_measured_and_keeps_its_sentence(tmp_path):
    measured = []

    def measure(settings, trial):
        measured.append(settings["size"])
        return speed(settings)

    study = search(tmp_path, measure, lambda each: f"{each['size']} is too large" if each["size"] > 4 else None)
    assert measured and max(measured) <= 4 and "size=4" in best_of(study).user_attrs[SETTINGS]
    assert {trial.user_attrs[SENTENCE] for trial in of(study, REFUSED)} <= {"8 is too large", "16 is too large"}
    assert len(of(study, MEASURED)) + len(of(study, REFUSED)) == counted(study)


def test_the_sampler_keeps_away_from_what_rejected(tmp_path):
    """The optimum lies where trials are rejected; as a control, a search without rejections goes there."""
    refused = len(of(search(tmp_path, trials=24, refusal=lambda each: "no" if each["size"] == 8 else None), REFUSED))
    (tmp_path / "control").mkdir()
    there = search(tmp_path / "control", trials=24)
    attracted = sum("size=8" in trial.user_attrs[SETTINGS] for trial in of(there, MEASURED))
    assert 0 < refused < attracted


def test_settings_that_are_known_are_not_measured_again(tmp_path):
    measured = []

    def measure(settings, trial):
        measured.append(tuple(settings.items()))
        return speed(settings)

    study = search(tmp_path, measure)
    assert len(measured) == len(set(measured)) == counted(study)
    assert all(trial.value is not None for trial in of(study, REPEATED))


def test_a_value_that_is_no_number_is_never_the_best(tmp_path):
    study = search(tmp_path, lambda settings, trial: math.nan if settings["size"] == 8 else speed(settings))
    assert of(study, FAILED) and all("size=8" in trial.user_attrs[SETTINGS] for trial in of(study, FAILED))
    assert "size=8" not in best_of(study).user_attrs[SETTINGS] and math.isfinite(best_of(study).value)


def test_a_run_that_fails_or_is_ended_early_is_told_as_that(tmp_path):
    def measure(settings, trial):
        trial.report(speed(settings), 1)
        if settings["size"] == 1:
            raise TrialFailed("a die ran out of device memory")
        if settings["size"] == 2:
            raise optuna.TrialPruned("ended after 1 of 5 steps")
        return speed(settings)

    study = search(tmp_path, measure)
    assert of(study, FAILED) and of(study, STOPPED) and best_of(study).value == study.best_value
    shown = table(study, "tokens/s")
    assert "x: a die ran out of device memory" in shown and f"{len(of(study, STOPPED))} stopped early" in shown
    assert line(of(study, FAILED)[0]).endswith("a die ran out of device memory")


class Killed(BaseException):
    """Simulates the death of the process in the middle of a trial."""


def test_ended_search_continues_without_losing_trials(tmp_path):
    begun, ended = [], []

    def measure(settings, trial):
        begun.append(tuple(settings.items()))
        if len(begun) == 5:
            raise Killed
        ended.append(tuple(settings.items()))
        return speed(settings)

    with pytest.raises(Killed):
        search(tmp_path, measure, trials=9)
    study = search(tmp_path, measure, trials=9)
    assert begun[5] == begun[4], "the trial that was killed is begun again, first of all"
    assert len(ended) == len(set(ended)) == counted(study) == 9
    assert not [trial for trial in study.trials if not trial.state.is_finished()]


def test_a_search_that_goes_on_proposes_something_new(tmp_path):
    """Resuming with the same seed would repeat the same trials, and none would count."""
    for trials in (3, 6):  # of 40; Optuna's model proposes none of them, because the first ten are random
        with opened(tmp_path, objective(speed), 40, 0, {}) as study:
            Search(SPACE, lambda settings: None, objective(speed), trials).carry_out(study)
    assert counted(study) == 6 and not of(study, REPEATED)


def test_a_search_ends_where_everything_has_been_tried(tmp_path):
    few = (Choice("size", ({"size": 1}, {"size": 2})),)
    with opened(tmp_path, objective(lambda settings, trial: settings["size"]), 40, 0, {}) as study:
        Search(few, lambda settings: None, objective(lambda settings, trial: settings["size"]), 40).carry_out(study)
    assert counted(study) == 2 and best_of(study).value == 2
    last_new = max(trial.number for trial in study.trials if outcome_of(trial) != REPEATED)
    assert len(study.trials) == last_new + 1 + 25  # so many in a row were already known


def test_a_new_search_begins_with_what_is_configured(tmp_path):
    config = {"size": 16, "share": 0.5, "tp": 4, "pp": 1}
    with opened(tmp_path, objective(speed), 1, 0, {}) as study:
        propose_configured(study, SPACE, config)
        Search(SPACE, lambda settings: None, objective(speed), 1).carry_out(study)
    assert study.trials[0].user_attrs[SETTINGS] == ["size=16", "share=0.5", "tp=4", "pp=1"]


def test_a_folder_is_for_one_search_and_one_process(tmp_path):
    search(tmp_path, trials=1, asked={"space": "a", "steps": "5"})
    with pytest.raises(SpaceError, match=r"contains a search with another steps \(5\). Choose another folder"):
        search(tmp_path, trials=1, asked={"space": "a", "steps": "6"})
    with (
        opened(tmp_path, objective(speed), 1, 0, {"space": "a", "steps": "5"}),
        pytest.raises(SpaceError, match="is invalid: another process"),
    ):
        search(tmp_path, trials=1, asked={"space": "a", "steps": "5"})


def test_settings_of_one_name_are_told_apart():
    assert short(["a.b.size=1", "a.c.size=2", "++a.b.n=[1,2]"]) == "b.size=1 c.size=2 n=[1,2]"


def test_results_are_files(tmp_path):
    study = search(tmp_path, trials=12)
    best = write_best(study, "tokens/s", tmp_path)
    lines = (tmp_path / "best.yaml").read_text().splitlines()
    assert lines[0].startswith(f"# Trial {best.number}: {best.value:g} tokens/s.")
    assert lines[1:] == [f"- {each}" for each in best.user_attrs[SETTINGS]]
    drawn = draw(study, "tokens/s", tmp_path)
    assert "optimization_history.png" in drawn and all((tmp_path / name).stat().st_size > 10_000 for name in drawn)
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    assert write_best(search(nothing, refusal=lambda settings: "no", trials=3), "tokens/s", nothing) is None
    assert not (nothing / "best.yaml").exists()


def test_a_quarter_of_the_trials_is_drawn_but_never_more_than_ten(tmp_path):
    for trials, drawn in ((1, 1), (12, 3), (40, 10), (400, 10)):
        with opened(tmp_path, objective(speed), trials, 7, {}) as study:
            assert study.sampler._n_startup_trials == drawn


def test_a_search_that_has_begun_is_not_given_the_configuration_again(tmp_path):
    search(tmp_path, trials=2)
    with opened(tmp_path, objective(speed), 3, 0, {"space": "of the test"}) as study:
        before = len(study.trials)
        propose_configured(study, SPACE, {"size": 16, "share": 0.5, "tp": 4, "pp": 1})
        assert len(study.trials) == before


def test_what_is_searched_is_told_apart_by_every_setting_of_the_space():
    asked = describe_asked((Choice("size", ({"size": 1}, {"size": 2})), Range("n", 1, 4)), steps=5, objective="reward")
    assert asked == {"steps": "5", "objective": "reward", "space": '{"size": [1, 2], "n": {"low": 1, "high": 4}}'}
