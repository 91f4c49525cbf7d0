"""The Geometry3K reward against verl's own: the format always, and answers where mathruler compares text only."""

import importlib
import sys
from types import ModuleType

import pytest

from post_training.rewards import accuracy, has_form, score
from post_training.rewards.verifier import Verifier
from verl_patches.utils.reward.rule_reward import compute_score, compute_score_and_format

RIGHT, WRONG = r"\boxed{5}", r"\boxed{6}"
RESPONSES = [
    f"<think>3, 4: 5</think>{RIGHT}",
    f"<think>3, 4: 5</think>\nThe answer is {RIGHT}.",
    f"<think>3, 4: 5</think>{WRONG}",
    RIGHT,
    WRONG,
    f" <think>3, 4: 5</think>{RIGHT}",
    f"<think>3, 4: 5 {RIGHT}",
    "<think>3, 4: 5</think>5",
    r"<think>3</think>\boxed{5",
    f"<think>one</think> and <think>two</think>{RIGHT}",
    f"<think></think>{RIGHT}",
    f"</think><think>{RIGHT}",
    "",
]


@pytest.fixture
def verls(monkeypatch):
    """verl's module, with a text comparison in place of mathruler's grader, which is not installed."""
    grader = ModuleType("mathruler.grader")
    grader.extract_boxed_content = lambda text: text.rpartition("\\boxed{")[2].partition("}")[0]
    grader.grade_answer = lambda answer, truth: answer == truth
    monkeypatch.setitem(sys.modules, "mathruler", ModuleType("mathruler"))
    monkeypatch.setitem(sys.modules, "mathruler.grader", grader)
    monkeypatch.delitem(sys.modules, "verl.utils.reward_score.geo3k", raising=False)
    yield importlib.import_module("verl.utils.reward_score.geo3k")
    sys.modules.pop("verl.utils.reward_score.geo3k", None)


@pytest.mark.parametrize("response", RESPONSES)
def test_form_equals_verls(response, verls):
    assert has_form(response, "geo3k") == verls.format_reward(response)


@pytest.mark.parametrize("response", [each for each in RESPONSES if each.startswith(("<think>3, 4: 5</think>", "\\"))])
def test_score_equals_verls(response, verls):
    found = score(response, "5", Verifier(), "geo3k")
    assert found == pytest.approx(verls.compute_score(response, "5"))
    assert accuracy(found, "geo3k") == verls.acc_reward(response, "5")


def test_answer_in_unfinished_thoughts_earns_nothing():
    """verl instead accepts a box inside unclosed thoughts."""
    assert score(f"<think>maybe {RIGHT}, but wait", "5", Verifier(), "geo3k") == 0.0


def test_notation_of_the_data_is_understood():
    truth = r"2 \sqrt { 221 }"  # Geometry3K's spelling
    assert score(r"<think>x</think>\boxed{2\sqrt{221}}", truth, Verifier(), "geo3k") == pytest.approx(1.0)
    assert score(r"<think>x</think>\boxed{\sqrt{884}}", truth, Verifier(), "geo3k") == pytest.approx(1.0)
    assert score(r"<think>x</think>\boxed{2\sqrt{222}}", truth, Verifier(), "geo3k") == pytest.approx(0.1)


def test_verl_calls_the_rule_by_its_name():
    response = f"<think>3</think>{WRONG}"
    assert compute_score("hiyouga/geometry3k", response, "5", rule="geo3k") == pytest.approx(0.1)
    parts = compute_score_and_format("hiyouga/geometry3k", response, "5", rule="geo3k")
    assert parts == {"score": pytest.approx(0.1), "acc": 0.0, "format": 1.0}


def test_form_takes_linear_time():
    assert not has_form("<think></think>" * 200_000 + "\\boxed{", "geo3k")
