"""Answers of every kind from public bug reports, with near misses: no false positives and no false negatives."""

from pathlib import Path

import pytest

from post_training.rewards import counts, score
from post_training.rewards.process import AlgebraPool
from post_training.rewards.verifier import Verifier

ROWS = Path(__file__).with_name("rows")
KINDS = sorted(file.stem for file in ROWS.glob("*.tsv"))
LEAST_ROWS, LEAST_OF_A_VERDICT = 30, 10


def rows(kind):
    """Return rows of (id, rule, truth, response, score); content without ! is put in a box."""
    for line in (ROWS / f"{kind}.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        name, rule, truth, content, right = line.split("\t")
        whole = content[1:].replace("\u23ce", "\n")
        yield name, rule, truth, whole if content.startswith("!") else rf"so \boxed{{{content}}}", float(right)


@pytest.fixture(scope="module")
def verifier():
    pool = AlgebraPool(1)
    yield Verifier(60.0, pool)
    pool.close()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_reports_are_scored_right(verifier, kind):
    counts.take()
    expected = {name: right for name, *_, right in rows(kind)}
    assert {name: score(response, truth, verifier, rule) for name, rule, truth, response, _ in rows(kind)} == expected
    assert not any(counts.take().values()), "every row has a result of its own, within the limit and without an error"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_kind_have_both_results(kind):
    found = [right for *_, right in rows(kind)]
    assert len(found) >= LEAST_ROWS and LEAST_OF_A_VERDICT <= sum(found) <= len(found) - LEAST_OF_A_VERDICT
    assert len({name for name, *_ in rows(kind)}) == len(found)


def test_every_reported_kind_has_rows():
    assert len(KINDS) == 15 and {"rates", "congruences", "tiny_values", "magnitudes", "chinese", "wrappers"} < set(
        KINDS
    )
