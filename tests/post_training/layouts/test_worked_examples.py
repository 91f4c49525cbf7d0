"""The worked examples in docstrings of layouts and plans are correct."""

import doctest

import pytest

from post_training.layouts import grouped_query
from post_training.reshard import overlaps, plan, rank_plan, relays, schedule

EXAMPLES = {grouped_query: 2, overlaps: 5, plan: 2, rank_plan: 1, relays: 1, schedule: 1}


def run(module) -> doctest.TestResults:
    return doctest.testmod(module, optionflags=doctest.REPORT_NDIFF)


@pytest.mark.parametrize("module", EXAMPLES, ids=lambda module: module.__name__)
def test_every_example_is_what_the_code_computes(module):
    found = [each for each in doctest.DocTestFinder().find(module) if each.examples]
    assert len(found) == EXAMPLES[module] and run(module).failed == 0


def test_wrong_example_detected(monkeypatch):
    right = overlaps.positions
    monkeypatch.setattr(overlaps, "positions", lambda counts: right(counts)[::-1])
    assert run(overlaps).failed > 0
