"""Interval endpoints in every notation: closed and open endpoints are different answers."""

from itertools import product

import pytest

from post_training.rewards import score
from post_training.rewards.process import AlgebraPool
from post_training.rewards.verifier import Verifier

LESS = {True: r"\le", False: "<"}
MORE = {True: r"\ge", False: ">"}
OPENS = {True: "[", False: "("}
CLOSES = {True: "]", False: ")"}


@pytest.fixture(scope="module")
def verifier():
    pool = AlgebraPool(1)
    yield Verifier(60.0, pool)
    pool.close()


def between(low, high):
    """Return notations of the interval from 1 to 2; low, high: whether each endpoint is included."""
    return (
        f"{OPENS[low]}1,2{CLOSES[high]}",
        f"1 {LESS[low]} x {LESS[high]} 2",
        f"2 {MORE[high]} x {MORE[low]} 1",
        rf"x {MORE[low]} 1 \text{{ and }} x {LESS[high]} 2",
        rf"1 {LESS[low]} x \text{{ and }} 2 {MORE[high]} x",
        rf"\{{x \mid 1 {LESS[low]} x {LESS[high]} 2\}}",
        rf"\{{y : 2 {MORE[high]} y {MORE[low]} 1\}}",
    )


def outside(low, high):
    """Return notations of the values up to 1 and from 2 on."""
    return (
        rf"(-\infty,1{CLOSES[low]} \cup {OPENS[high]}2,\infty)",
        rf"x {LESS[low]} 1 \text{{ or }} x {MORE[high]} 2",
        rf"1 {MORE[low]} x \text{{ or }} 2 {LESS[high]} x",
    )


def below(end, _):
    return rf"(-\infty,2{CLOSES[end]}", f"x {LESS[end]} 2", f"2 {MORE[end]} x", rf"\{{t \mid 2 {MORE[end]} t\}}"


def above(end, _):
    return rf"{OPENS[end]}2,\infty)", f"x {MORE[end]} 2", f"2 {LESS[end]} x", rf"\{{t \mid 2 {LESS[end]} t\}}"


ENDS = tuple(product((True, False), repeat=2))


@pytest.mark.parametrize(
    ("notations", "ends"), [(between, ENDS), (outside, ENDS), (below, ENDS[::2]), (above, ENDS[::2])]
)
def test_ends_decide_in_every_notation(verifier, notations, ends):
    for truth_ends, answer_ends in product(ends, repeat=2):
        for truth, answer in product(notations(*truth_ends)[:2], notations(*answer_ends)):
            right = float(truth_ends == answer_ends)
            assert score(rf"\boxed{{{answer}}}", truth, verifier) == right, (truth, answer)


def test_each_side_of_two_is_its_own(verifier):
    for truth, answer in product(below(True, None)[:2], above(True, None)):
        assert score(rf"\boxed{{{answer}}}", truth, verifier) == 0.0, (truth, answer)
