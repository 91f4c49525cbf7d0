"""vLLM-Ascend 0.23's own unit tests: each passes, or is listed in vllm_ascend.toml with the reason."""

from pathlib import Path

import pytest

from tests.stack_2026.upstream import vllm_ascend_ut as unit_tests
from tests.upstream.op_plugin import Outcome, share

pytestmark = [pytest.mark.slow, pytest.mark.timeout(10800)]

KINDS = {"broken upstream", "needs another package", "needs hardware", "not emulated", "time limit"}


def judge(outcomes: list[Outcome], at_least: int) -> None:
    """Fail if an unlisted test failed, or if all tests that an entry lists for these files passed."""
    passed, ran = share(outcomes)
    print(f"{passed} of {ran} tests that ran passed, in {len(outcomes)} files")
    assert passed >= at_least
    table, failed = unit_tests.reasons(), unit_tests.failures(outcomes)
    listed = {test: unit_tests.reason_of(test, table) for test in failed}
    assert {test: failed[test] for test, entry in listed.items() if entry is None} == {}
    files, met = {outcome.file for outcome in outcomes}, [entry["test"] for entry in listed.values()]
    # On a faster machine tests with a time limit may pass.
    certain = [entry["test"] for entry in table if entry["kind"] != "time limit"]
    needless = [test for test in certain if test.split()[0] in files and test not in met]
    assert needless == [], "listed, and passes"


def test_unit_tests_for_npus_pass(upstream: Path):
    names = unit_tests.files(upstream, unit_tests.ON_NPUS)
    assert len(names) == 37
    judge(unit_tests.run(upstream, names), at_least=550)


@pytest.mark.exhaustive
def test_unit_tests_for_machines_without_one_pass(upstream: Path):
    names = set(unit_tests.files(upstream)) - set(unit_tests.files(upstream, unit_tests.ON_NPUS))
    assert len(names) == 117
    judge(unit_tests.run(upstream, sorted(names)), at_least=900)


def test_every_reason_is_of_a_kind():
    assert {entry["kind"] for entry in unit_tests.reasons()} <= KINDS


def test_first_reason_that_fits_counts():
    table = [{"test": "tests/a.py test_x*", "kind": "k", "reason": "r"}, {"test": "tests/a.py *", "kind": "k2"}]
    assert unit_tests.reason_of("tests/a.py test_x_1", table)["reason"] == "r"
    assert unit_tests.reason_of("tests/a.py test_y", table)["kind"] == "k2"
    assert unit_tests.reason_of("tests/b.py test_x", table) is None
