"""The exact output of a search, for given trials."""

import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from post_training.tuning.results import line, short, table, write_best
from post_training.tuning.search import FAILED, MEASURED, OUTCOME, REFUSED, REPEATED, SENTENCE, SETTINGS, STOPPED

KINDS = {"size": IntDistribution(1, 100), "share": FloatDistribution(0.0, 1.0)}


def trial(size: int, outcome: str | None, sentence: str = "", value: float | None = None, state=None):
    state = state or (TrialState.PRUNED if value is None else TrialState.COMPLETE)
    told = {OUTCOME: outcome, SENTENCE: sentence} if outcome else {}
    return create_trial(
        state=state,
        value=value,
        params={"size": size, "share": 0.5},
        distributions=KINDS,
        user_attrs={SETTINGS: [f"job.size={size}", "++job.share=0.5"], **told},
    )


TRIALS = [
    trial(1, MEASURED, "", 10.0),
    trial(2, MEASURED, "", 1234567.0),
    trial(3, REFUSED, "too large"),
    trial(4, REFUSED, "does not divide"),
    trial(5, REFUSED, "does not divide"),
    trial(6, STOPPED, "ended after 1 of 5 steps"),
    trial(7, FAILED, "a die ran out of memory"),
    trial(2, REPEATED, "as trial 1", 1234567.0),
    trial(8, MEASURED, "", 12.345678),
    trial(9, None, state=TrialState.FAIL),
]


def study(direction: str, trials=TRIALS) -> optuna.Study:
    made = optuna.create_study(direction=direction)
    made.add_trials(trials)
    return made


def test_a_trial_is_a_line_with_its_value_or_its_outcome():
    trials = study("maximize").trials
    assert [line(trials[number]) for number in (0, 1, 2, 5)] == [
        "    0            10  size=1 share=0.5",
        "    1   1.23457e+06  size=2 share=0.5",
        "    2       refused  size=3 share=0.5: too large",
        "    5 stopped early  size=6 share=0.5: ended after 1 of 5 steps",
    ]


def test_the_table_has_the_best_first_and_counts_and_reasons_below():
    reasons = (
        "3 measured, 3 refused, 1 stopped early, 1 failed\n"
        "refused 2x: does not divide\nrefused 1x: too large\nfailed 1x: a die ran out of memory"
    )
    first, second, third = (
        "    1   1.23457e+06  size=2 share=0.5",
        "    8       12.3457  size=8 share=0.5",
        "    0            10  size=1 share=0.5",
    )
    assert (
        table(study("maximize"), "tokens/s") == f"trial      tokens/s  settings\n{first}\n{second}\n{third}\n{reasons}"
    )
    assert table(study("minimize"), "a very long unit") == (
        f"trial a very long u  settings\n{third}\n{second}\n{first}\n{reasons}"
    )
    assert table(study("maximize", []), "s") == "trial             s  settings\nno trial has ended"


def test_ten_trials_and_five_reasons_are_shown():
    many = [trial(number, MEASURED, "", float(number)) for number in range(1, 13)]
    many += [trial(50 + number, REFUSED, f"reason {number}") for number in range(7) for _ in range(7 - number)]
    lines = table(study("maximize", many), "s").splitlines()
    assert [text.split()[1] for text in lines[1:11]] == [str(value) for value in range(12, 2, -1)]
    assert lines[11:] == ["12 measured, 28 refused", *(f"refused {7 - n}x: reason {n}" for n in range(5))]


def test_settings_are_shown_by_the_last_part_of_their_keys():
    assert short(["a.b.size=1", "a.c.size=2", "x.y.z=1=2"]) == "b.size=1 c.size=2 z=1=2"
    assert short(["alone=3"]) == "alone=3" and short([]) == ""


def test_the_best_settings_are_a_file_of_overrides(tmp_path):
    best = write_best(study("minimize"), "s a step", tmp_path)
    assert best.number == 0
    assert (tmp_path / "best.yaml").read_text() == (
        "# Trial 0: 10 s a step. Overrides for a launcher, after --.\n- job.size=1\n- ++job.share=0.5\n"
    )
    assert write_best(study("maximize"), "tokens/s", tmp_path).number == 1
    assert (tmp_path / "best.yaml").read_text().startswith("# Trial 1: 1.23457e+06 tokens/s.")
