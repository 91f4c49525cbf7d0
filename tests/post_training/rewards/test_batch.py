"""Scoring a batch of answers: time budget, threads, counts of answers without a result, and the process pool."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from post_training.rewards import batch, counts, rules, score
from post_training.rewards.process import AlgebraPool, ComparisonLost, ComparisonTimeout, WorkerError, shared_pool
from post_training.rewards.verifier import Limits, Verifier

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def none_counted():
    counts.take()
    yield
    counts.take()


class Endless:
    """Stand-in for a process whose comparisons all time out, without the wait."""

    def __init__(self):
        self.limits = []

    def equal(self, truth, answer, limit_s):
        self.limits.append(limit_s)
        spent.append(limit_s)
        raise ComparisonTimeout


spent: list[float] = []


@pytest.fixture
def clock(monkeypatch):
    """Verifier clock that advances only by the time comparisons take."""
    spent.clear()
    monkeypatch.setattr("post_training.rewards.verifier.time.monotonic", lambda: sum(spent))


def test_a_batch_of_slow_answers_ends_within_twice_its_budget(clock):
    endless = Endless()
    verifier = Verifier(5.0, endless, budget_s=60.0)
    with batch.opened():
        for number in range(800):
            assert score(rf"\boxed{{\binom{{1000000000}}{{{number}}}+x}}", "5", verifier) == 0.0
    assert endless.limits[:12] == [5.0] * 12 and set(endless.limits[12:]) == {batch.SHORT_LIMIT_S}
    assert 60.0 < sum(spent) <= 120.0 + batch.SHORT_LIMIT_S
    taken = counts.take()
    assert taken[counts.TIMED_OUT] == len(endless.limits) and sum(taken.values()) == 800
    assert taken[counts.OVER_BUDGET] == 800 - len(endless.limits)


def test_the_next_batch_has_its_whole_budget(clock):
    endless = Endless()
    verifier = Verifier(5.0, endless, budget_s=5.0)
    for number in range(2):
        with batch.opened():
            verifier.equal("x", f"y+{number}")
            verifier.equal("x", f"z+{number}")
    assert endless.limits == [5.0, batch.SHORT_LIMIT_S] * 2


def test_processes_share_a_budget_of_the_wall_clock(clock):
    endless = Endless()
    verifier = Verifier(5.0, endless, budget_s=5.0)
    with batch.opened(parallel=3):
        for number in range(4):
            verifier.equal("x", f"y+{number}")
    assert endless.limits == [5.0] * 3 + [batch.SHORT_LIMIT_S]


def test_outside_of_a_batch_only_the_time_limit_counts(clock):
    endless = Endless()
    verifier = Verifier(5.0, endless, budget_s=5.0)
    for number in range(4):
        verifier.equal("x", f"y+{number}")
    assert endless.limits == [5.0] * 4 and batch.current() is None


def test_answers_that_numbers_decide_cost_no_budget(clock):
    verifier = Verifier(5.0, Endless(), budget_s=5.0)
    with batch.opened():
        verifier.equal("x", "y")
        verifier.equal("x", "z")
        for _ in range(100):
            verifier.equal("x", "w")
        assert score(r"\boxed{\frac{10}{2}}", "5", verifier) == 1.0


def test_a_comparison_that_ends_its_process_is_counted():
    class Dying:
        def equal(self, truth, answer, limit_s):
            raise ComparisonLost

    assert score(r"\boxed{x}", "y+1", Verifier(5.0, Dying())) == 0.0
    assert counts.take()[counts.LOST] == 1


def test_a_rule_that_raises_scores_0_and_is_counted(monkeypatch):
    def raising(response, truth, verifier):
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setitem(rules.RULES, "boxed", raising)
    assert score(r"\boxed{5}", "5", Verifier(5.0, Endless())) == 0.0
    assert counts.take() == dict.fromkeys(counts.ALL, 0) | {counts.RULE_ERRORS: 1}
    assert counts.take() == dict.fromkeys(counts.ALL, 0), "what was taken is forgotten"


def test_a_pool_that_cannot_start_is_an_error_and_no_score():
    with pytest.raises(WorkerError, match="did not start"):
        score(r"\boxed{x}", "y+1", Verifier(5.0, AlgebraPool(1, [sys.executable, "-c", "raise SystemExit(1)"])))


ECHOING = """
import json, sys
print('{"ready": true}', flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    open(asked["answer"], "w").close()
    while not all(map(__import__("os").path.exists, json.loads(asked["truth"]))):
        pass
    print('{"equal": true}', flush=True)
"""


def test_a_pool_compares_at_the_same_time(tmp_path):
    """Each comparison finishes only once all have begun, so running them in sequence would never finish."""
    files = [str(tmp_path / str(number)) for number in range(3)]
    pool = AlgebraPool(3, [sys.executable, "-c", ECHOING])
    judged = batch.judged_together(lambda file: pool.equal(json.dumps(files), file, 60.0), files, 3)
    assert judged == [True] * 3 and len(pool._all) == 3
    pool.close()


def test_a_pool_has_no_more_processes_than_its_size(tmp_path):
    pool = AlgebraPool(2, [sys.executable, "-c", ECHOING])
    files = [str(tmp_path / str(number)) for number in range(8)]
    assert batch.judged_together(lambda file: pool.equal("[]", file, 60.0), files, 8) == [True] * 8
    assert len(pool._all) <= 2
    pool.resize(3)
    together = json.dumps([str(tmp_path / name) for name in "abc"])
    assert batch.judged_together(lambda file: pool.equal(together, str(tmp_path / file), 60.0), "abc", 3) == [True] * 3
    assert len(pool._all) == 3
    pool.close()


def test_the_shared_pool_is_bounded_by_cores_and_one_a_process():
    assert shared_pool() is shared_pool() and 1 <= AlgebraPool().size <= min(8, len(os.sched_getaffinity(0)))
    child = os.fork()
    if child == 0:
        os._exit(0 if shared_pool()._all == [] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_scores_keep_the_order_of_their_answers():
    later = threading.Event()

    def scored(number):
        if number == 0:
            assert later.wait(60)
        else:
            later.set()
        return number

    assert batch.judged_together(scored, [0, 1, 2], 2) == [0, 1, 2] and batch.current() is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time_limit_s": 0}, "time_limit_s=0 is invalid"),
        ({"budget_s": float("inf")}, "budget_s=inf is invalid"),
        ({"budget_s": "long"}, "budget_s=long is invalid"),
        ({"workers": -1}, "workers=-1 is invalid"),
        ({"workers": True}, "workers=True is invalid"),
        ({"workers": 100_000}, "workers=100000 is invalid"),
    ],
)
def test_invalid_limits_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        Limits(**settings)


@pytest.mark.parametrize(
    ("response", "rule"),
    [
        (r"\boxed{7 km" + " squared" * 25 + "}", "boxed"),
        (r"\boxed{7 km" + " squared cubed" * 400 + "}", "boxed"),
        (r"\boxed{" + "$" * 1000 + "7}", "boxed"),
        (r"\boxed{" + r"\$" * 1000 + "7}", "boxed"),
        (r"\boxed{" + r"\text{" * 700 + "7}", "boxed"),
        ("####" + "\n" * 1_000_000, "gsm8k"),
        ("####" + "\n" * 1_000_000 + "x", "gsm8k"),
        ("####\n " * 100_000 + "x", "gsm8k"),
        ("#### $" + " $" * 100_000 + "x", "gsm8k"),
    ],
)
def test_reported_degenerate_answers_score_0_at_once(response, rule):
    """Each of these once ran for minutes or raised; now the process that scores them would be killed at its limit."""
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_CPU, (20, 20))\n"
        "from post_training.rewards import counts, score\n"
        "from post_training.rewards.verifier import Verifier\n"
        "from tests.post_training.rewards.degenerate import Undecided\n"
        "right = score(sys.stdin.read(), '12', Verifier(1.0, Undecided()), sys.argv[1])\n"
        "sys.exit(int(right != 0.0 or any(counts.take().values())))\n"
    )
    finished = subprocess.run([sys.executable, "-c", program, rule], cwd=ROOT, input=response, text=True)
    assert finished.returncode == 0


def test_degenerate_answers_are_judged_within_their_time():
    """Score 2,000 of the 100,000 seeds tried; if the rules were not linear, one answer would use up the limit."""
    program = [sys.executable, "-m", "tests.post_training.rewards.degenerate", "0", "2000", "60"]
    assert subprocess.run(program, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


def test_prepared_pool_starts_no_process_for_a_comparison(tmp_path):
    pool = AlgebraPool(3, [sys.executable, "-c", ECHOING])
    pool.prepare()
    prepared = {process._process.pid for process in pool._all}
    assert len(prepared) == 3
    files = [str(tmp_path / str(number)) for number in range(3)]
    assert batch.judged_together(lambda file: pool.equal(json.dumps(files), file, 60.0), files, 3) == [True] * 3
    assert {process._process.pid for process in pool._all} == prepared
    pool.close()
