"""Token rates, checked against the recipe's published table."""

import pytest

from post_training.report.published import CARDS, RANDOM_WEIGHTS, ROWS, TRUE_WEIGHTS
from post_training.report.rates import COLUMNS, Rates, StepStatistics, rates


def statistics(**changes) -> StepStatistics:
    given = {
        "sequences": 10,
        "prompt_tokens": 2.0,
        "response_tokens": 6.0,
        "truncated": None,
        "seconds": {"rollout": 3.0, "update": 4.0},
        "total": 8.0,
    }
    return StepStatistics(**(given | changes))


def test_a_worked_example():
    """Compute the rates of 60 response tokens in 3 s and 80 tokens in 4 s and 8 s, on two cards."""
    assert rates(statistics(), 2) == Rates(rollout=10.0, training=10.0, system=5.0)
    assert rates(statistics(), 2).over(2) == rates(statistics(), 4) == Rates(5.0, 5.0, 2.5)


def test_saving_and_validation_count_in_one_of_two_rates():
    """80 tokens take 8 s on two cards, of which 3 s are saving and validation."""
    found = rates(statistics(aside=3.0), 2)
    assert (found.system, found.trained) == (5.0, 8.0)
    assert found.over(2).trained == 4.0
    assert rates(statistics(aside=0.0), 2).trained == 5.0
    assert rates(statistics(), 2).trained is None, "what was published does not say"


@pytest.mark.parametrize("seconds", [{}, {"rollout": None, "update": None}, {"rollout": 0.0, "update": 0.0}])
def test_unmeasured_stage_has_no_rate(seconds):
    assert rates(statistics(seconds=seconds), 2) == Rates(None, None, 5.0)
    assert rates(statistics(seconds=seconds), 2).over(2) == Rates(None, None, 2.5)


def test_the_row_with_true_weights_follows_from_its_own_inputs():
    """512 x 16 sequences of 77.8 + 1576.6 tokens on 128 cards; the published rollout rate is one token/s too high."""
    found = rates(TRUE_WEIGHTS.statistics, CARDS)
    assert found.system == pytest.approx(123.16, abs=0.005) == TRUE_WEIGHTS.rates.system
    assert found.training == pytest.approx(331.6, abs=0.05) == TRUE_WEIGHTS.rates.training
    assert found.rollout == pytest.approx(270.05, abs=0.005) and TRUE_WEIGHTS.rates.rollout == 271.05


def test_the_row_with_random_weights_follows_from_its_own_inputs_but_for_what_its_conditions_say():
    found = rates(RANDOM_WEIGHTS.statistics, CARDS)
    assert found.system == pytest.approx(250.2, abs=0.05) == RANDOM_WEIGHTS.rates.system
    assert (round(found.rollout), round(found.training)) == (611, 606)
    assert (RANDOM_WEIGHTS.rates.rollout, RANDOM_WEIGHTS.rates.training) == (686.8, 607.2)
    assert (
        "611 tokens" in RANDOM_WEIGHTS.conditions[-1]
        and "the training 606, not 686.8 and 607.2" in RANDOM_WEIGHTS.conditions[-1]
    )


def test_the_columns_of_a_published_row_add_up_to_its_total_but_for_what_its_conditions_say():
    sums = [sum(row.statistics.seconds.values()) for row in ROWS]
    assert sums == [pytest.approx(859.66, abs=0.005), pytest.approx(801.288, abs=0.005)]
    assert sums[0] == pytest.approx(TRUE_WEIGHTS.statistics.total, abs=0.05)
    assert "801.3 s" in RANDOM_WEIGHTS.conditions[-1]
    assert all(tuple(row.statistics.seconds) == COLUMNS for row in ROWS)


def test_the_seconds_with_eight_layers_recomputed_are_those_of_112_tokens_a_second():
    assert TRUE_WEIGHTS.statistics.tokens / CARDS / 112 == pytest.approx(945, abs=0.5)
    assert "945 s" in TRUE_WEIGHTS.conditions[1]
