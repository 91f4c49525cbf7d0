"""The rule rewards: a table of cases, and the time limit that must hold."""

import os
import signal
import subprocess
import sys
import time

import pytest

from verl_patches.features.reward import RULES, score
from verl_patches.features.reward.answers import compare_plainly, last_boxed
from verl_patches.features.reward.judge import Judge

HANGING_WORKER = "import sys, time; print('ready', flush=True); sys.stdin.readline(); time.sleep(600)"
DYING_WORKER = "import sys; print('ready', flush=True); sys.stdin.readline()"


@pytest.fixture(scope="module")
def judge():
    judge = Judge(time_limit_s=30.0)
    yield judge
    judge.close()


@pytest.fixture
def forbidden_judge():
    """A judge that fails the test when it is asked: for cases that text and numbers must decide."""
    return Judge(command=["/nonexistent-worker"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{55}", "55"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{}", ""),
        (r"first \boxed{3} and \boxed{cut off", "3"),
        ("no box 55", None),
        (r"\boxed{never closed", None),
        ("", None),
    ],
)
def test_last_box_is_found(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("truth", "answer", "expected"),
    [
        ("55", "55", True),
        ("55", "54", False),
        ("55", "55.0", True),
        ("1234", "1,234", True),
        ("-3", "\u22123", True),
        ("0.5", ".5", True),
        ("5", "", False),
        ("12", "1,2", None),
        ("5", r"\frac{10}{2}", None),
        ("x+1", "1+x", None),
        ("55", "5-", None),
        ("1", "9" * 400, False),
    ],
)
def test_plain_comparison_decides_or_abstains(truth, answer, expected):
    assert compare_plainly(truth, answer) is expected


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"\boxed{55}", "55", 1.0),
        (r"\boxed{54}", "55", 0.0),
        ("55", "55", 0.0),
        (r"I count 12: \boxed{7}", "2", 0.0),
        (r"\boxed{1}</think> no: \boxed{2}", "2", 1.0),
        (r"\boxed{2}</think> no box here", "2", 0.0),
        (r"\boxed{70,000}", "70000", 1.0),
        (r"\boxed{60}", r"\boxed{60}", 1.0),
    ],
)
def test_boxed_rule_without_algebra(forbidden_judge, response, truth, expected):
    assert score(response, truth, forbidden_judge) == expected


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("0.5", r"\frac{1}{2}", 1.0),
        ("1/2", r"\frac12", 1.0),
        ("1/3", r"\frac12", 0.0),
        ("1+x^2", "x^2+1", 1.0),
        (r"3\sqrt{2}", r"\sqrt{18}", 1.0),
        (r"\{2,1\}", r"\{1,2\}", 1.0),
        (r"5\text{ cm}", "5", 1.0),
        ("(2,1)", "(1,2)", 0.0),
        ("5-", "55", 0.0),
        (r"}{\frac", "5", 0.0),
        ("hello", "5", 0.0),
    ],
)
def test_boxed_rule_with_algebra(judge, answer, truth, expected):
    assert score(rf"\boxed{{{answer}}}", truth, judge) == expected


def test_substring_rule_keeps_its_known_weakness(judge):
    assert score(r"I count 12: \boxed{7}", "2", judge, rule="substring") == 1.0
    assert score(r"\boxed{0.5}", r"\frac{1}{2}", judge, rule="substring") == 0.0
    assert score(r"I count 12: \boxed{7}", "2", judge, rule="boxed") == 0.0


def test_unknown_rule_names_the_known_ones(judge):
    with pytest.raises(ValueError, match="boxed, substring"):
        score("", "", judge, rule="exact")
    assert set(RULES) == {"boxed", "substring"}


def test_limit_must_be_positive():
    with pytest.raises(ValueError, match="above 0"):
        Judge(time_limit_s=0)


def test_hanging_comparison_is_killed_and_the_worker_replaced():
    judge = Judge(time_limit_s=0.2, command=[sys.executable, "-c", HANGING_WORKER])
    first = judge.equal("1", "x")
    hung = judge._worker
    second = judge.equal("1", "x")
    assert first.timed_out and second.timed_out and judge.timeouts == 2
    assert not first.equal and hung is None and judge._worker is None


def test_algebra_without_end_is_killed_and_later_samples_are_judged():
    judge = Judge(time_limit_s=30.0)
    assert judge.equal(r"\frac12", "0.5").equal
    worker = judge._worker
    os.kill(worker.pid, signal.SIGSTOP)  # a computation that never answers
    judge.time_limit_s = 0.2
    assert judge.equal(r"\frac12", "0.5").timed_out
    assert worker.returncode == -signal.SIGKILL
    judge.time_limit_s = 30.0
    assert judge.equal(r"\frac12", "0.5").equal
    judge.close()


def test_prepared_worker_serves_the_first_comparison():
    judge = Judge(time_limit_s=30.0)
    judge.prepare()
    prepared = judge._worker
    assert judge.equal(r"\frac12", "0.5").equal and judge._worker is prepared
    judge.close()


def test_worker_that_dies_of_a_sample_makes_it_wrong():
    judge = Judge(command=[sys.executable, "-c", DYING_WORKER])
    verdict = judge.equal("1", "x")
    assert not verdict.equal and not verdict.timed_out


def test_worker_that_cannot_start_is_an_error():
    with pytest.raises(RuntimeError, match="did not start"):
        Judge(command=[sys.executable, "-c", "raise SystemExit(1)"]).equal("1", "x")


def test_worker_ends_with_its_parent():
    parent = (
        "import os, signal\n"
        "from verl_patches.features.reward.judge import Judge\n"
        "judge = Judge(time_limit_s=60)\n"
        "judge.equal('x', 'y')\n"
        "os.kill(judge._worker.pid, signal.SIGSTOP)\n"
        "print(judge._worker.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    finished = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True)
    worker = int(finished.stdout)
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{worker}") and not _is_zombie(worker):
        assert time.monotonic() < deadline, "the worker outlived its parent"


def _is_zombie(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
