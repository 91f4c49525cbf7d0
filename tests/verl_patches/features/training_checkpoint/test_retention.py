"""Which checkpoints are deleted, compared with the rules applied to one checkpoint at a time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_patches.features.training_checkpoint.feature import CheckpointSettings, KeepBest
from verl_patches.features.training_checkpoint.retention import score_of, steps_to_delete

STEPS = st.sets(st.integers(1, 30), min_size=1, max_size=12)


@given(
    steps=STEPS,
    last=st.integers(0, 4),
    every=st.sampled_from([0, 1, 4, 5]),
    mode=st.sampled_from(["max", "min"]),
    count=st.integers(1, 3),
    data=st.data(),
)
def test_a_checkpoint_goes_if_no_rule_keeps_it(steps, last, every, mode, count, data):
    """There are few different scores, so that many are equal; some steps have none."""
    scores = {step: data.draw(st.sampled_from([0.25, 0.5, 0.5, 1.0])) for step in steps if data.draw(st.booleans())}
    keep = CheckpointSettings(keep_last=last, keep_every=every, keep_best=KeepBest("val/score", mode, count))

    def better(one, other):
        gain = scores[one] - scores[other] if mode == "max" else scores[other] - scores[one]
        return gain > 0 or (gain == 0 and one > other)

    expected = []
    for step in sorted(steps):
        among_the_last = sum(other > step for other in steps) < last
        among_the_best = step in scores and sum(better(other, step) for other in scores) < count
        if last and not among_the_last and not (every and step % every == 0) and not among_the_best:
            expected.append(step)
    assert steps_to_delete(steps, keep, scores) == expected


def test_without_a_metric_scores_keep_nothing():
    keep = CheckpointSettings(keep_last=1, keep_best=KeepBest("", "max", 2))
    assert steps_to_delete({2, 4, 6}, keep, {2: 1.0, 4: 0.5}) == [2, 4]


@pytest.mark.parametrize(
    ("metric", "value", "kept"),
    [
        ("val/score", 0.5, 0.5),
        ("val/score", 1, 1.0),
        ("val/score", math.nan, None),
        ("", 0.5, None),
        ("else", 0.5, None),
    ],
)
def test_a_score_is_kept_where_the_metric_has_a_value(metric, value, kept):
    found = score_of(KeepBest(metric, "max", 1), {"val/score": value})
    assert found == (None if kept is None else {"metric": metric, "value": kept})
