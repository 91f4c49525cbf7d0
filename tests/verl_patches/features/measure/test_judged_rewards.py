"""verl's reward manager with answers verified together: the same rewards, also when the prompt opens the thought."""

import copy
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from post_training.rewards import batch
from post_training.rewards.rules import score
from verl_patches.features.measure import judged_rewards
from verl_patches.features.measure.judged_rewards import JudgedRewards, judged_together

PROMPT, RESPONSE, PAD = 10, 30, 0


class Characters:
    """A tokenizer with one token per character."""

    def encode(self, text):
        return [ord(character) for character in text]

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(chr(int(token)) for token in tokens)


class NoAlgebra:
    """A verifier that must not be called for these answers."""

    def equal(self, truth, answer):
        raise AssertionError(truth, answer)


def data_of(rows, prompt="2+3?"):
    """Return verl's DataProto of (response, truth) rows: left-padded prompts, right-padded responses."""
    from verl import DataProto

    tokens = Characters()
    prompts = torch.full((len(rows), PROMPT), PAD)
    responses = torch.full((len(rows), RESPONSE), PAD)
    mask = torch.zeros(len(rows), PROMPT + RESPONSE, dtype=torch.long)
    for row, (response, _) in enumerate(rows):
        asked, answered = tokens.encode(prompt), tokens.encode(response)
        prompts[row, PROMPT - len(asked) :] = torch.tensor(asked)
        responses[row, : len(answered)] = torch.tensor(answered)
        mask[row, PROMPT - len(asked) : PROMPT + len(answered)] = 1
    return DataProto.from_dict(
        tensors={"prompts": prompts, "responses": responses, "attention_mask": mask},
        non_tensors={
            "reward_model": np.array([{"ground_truth": truth} for _, truth in rows], dtype=object),
            "data_source": np.array(["own"] * len(rows), dtype=object),
        },
    )


def manager_of(compute_score):
    from verl.workers.reward_manager import NaiveRewardManager

    return NaiveRewardManager(Characters(), num_examine=0, compute_score=compute_score)


def ruled(data_source, solution_str, ground_truth, extra_info=None):
    found = score(solution_str, ground_truth, NoAlgebra())
    return {"score": found, "acc": found}


ROWS = [(r"\boxed{5}", "5"), (r"\boxed{6}", "5"), (r"\boxed{5}", "5"), ("no", "5"), (r"so \boxed{7}", "7")]


@pytest.fixture
def safe(monkeypatch):
    monkeypatch.setattr(batch, "_safe_for_threads", True)


def test_rewards_are_those_of_verl_alone(safe):
    alone = manager_of(ruled)(data_of(ROWS), return_dict=True)
    together = judged_together(manager_of(ruled))(data_of(ROWS), return_dict=True)
    assert torch.equal(alone["reward_tensor"], together["reward_tensor"]) and alone["reward_tensor"].sum() == 3
    assert alone["reward_extra_info"] == together["reward_extra_info"]
    assert torch.equal(judged_together(manager_of(ruled))(data_of(ROWS)), alone["reward_tensor"])


def test_answers_are_judged_at_the_same_time_and_once(safe, monkeypatch):
    monkeypatch.setattr(judged_rewards, "shared_pool", lambda: SimpleNamespace(size=2))
    both, calls = threading.Barrier(2, timeout=60), []

    def scored(data_source, solution_str, ground_truth, extra_info=None):
        calls.append(solution_str)
        assert batch.current() is not None
        both.wait()
        return 1.0

    manager = manager_of(scored)
    assert JudgedRewards(manager)(data_of([("a", "5"), ("b", "5"), ("a", "5")])).sum() == 3
    assert sorted(calls) == ["a", "b"] and manager.compute_score is scored and batch.current() is None


def test_a_reward_of_the_users_own_is_called_in_turn(monkeypatch):
    monkeypatch.setattr(batch, "_safe_for_threads", False)
    threads = []

    def own(data_source, solution_str, ground_truth, extra_info=None):
        threads.append(threading.current_thread())
        return 1.0

    assert judged_together(manager_of(own))(data_of(ROWS)).sum() == len(ROWS)
    assert threads == [threading.main_thread()] * len(ROWS)


@pytest.mark.parametrize(("prompt", "right"), [("?<think>", 1), ("?<think>\n", 1), ("?", 2), ("<think>?", 2)])
def test_a_box_in_a_thought_that_the_prompt_opens_is_none(safe, prompt, right):
    rows = [(r"\boxed{5}", "5"), (r"hm</think>\boxed{5}", "5"), (r"\boxed{5}</think>no", "5")]
    assert judged_together(manager_of(ruled))(data_of(rows, prompt)).sum() == right


def test_exception_of_the_reward_propagates(safe):
    def raising(**arguments):
        raise ValueError("no")

    manager = manager_of(raising)
    with pytest.raises(ValueError, match="no"):
        judged_together(manager)(data_of(ROWS))
    assert manager.compute_score is raising and batch.current() is None


def test_the_managers_attributes_stay_in_reach():
    manager = manager_of(ruled)
    judged = judged_together(manager)
    assert judged.tokenizer is manager.tokenizer and judged_together(None) is None
    assert copy.copy(judged).tokenizer is manager.tokenizer
