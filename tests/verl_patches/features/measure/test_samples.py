"""Samples of a step: responses to a prompt are together, unpadded and bounded; the first and last step are kept."""

import json

import numpy as np
import pytest
import torch

from post_training.report.samples import CHARACTERS, PROMPTS, RESPONSES, Sample, read_samples, shortened
from verl_patches.features.measure.run_files import RunFiles
from verl_patches.features.measure.samples import hold_samples, take_samples


class Letters:
    """A tokenizer in which token n is the n-th letter."""

    def decode(self, tokens):
        return "".join(chr(ord("a") + token) for token in tokens)


def batch(prompts, responses: int = 2):
    """Return verl's batch of left-padded prompts of one token with right-padded responses of two."""
    protocol = pytest.importorskip("verl").DataProto
    rows = len(prompts)
    tensors = {
        "prompts": torch.tensor([[25, prompt] for prompt in prompts]),
        "responses": torch.tensor([[0, row % 25, 25] for row in range(rows)]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 0]] * rows),
    }
    truths = np.array([{"ground_truth": str(prompt)} for prompt in prompts], dtype=object)
    names = np.array([f"uid-{prompt}" for prompt in prompts], dtype=object)
    rewards = torch.zeros(rows, 3)
    rewards[:, 1] = torch.arange(rows)
    data = protocol.from_dict(tensors=tensors, non_tensors={"reward_model": truths, "uid": names})
    return data, (rewards, {})


def test_responses_to_a_prompt_lie_together_and_have_no_padding():
    data, result = batch([1, 0, 1, 2, 0])
    result[0][2, 0] = float("nan")
    hold_samples(data, result, Letters())
    assert take_samples() == [
        Sample(0, "b", "aa", "1", 0.0, 2),
        Sample(0, "b", "ac", "1", None, 2),
        Sample(1, "a", "ab", "0", 1.0, 2),
        Sample(1, "a", "ae", "0", 4.0, 2),
        Sample(2, "c", "ad", "2", 3.0, 2),
    ]
    assert take_samples() == []


def test_a_large_batch_leaves_a_few_and_no_tokenizer_leaves_none():
    data, result = batch([row % 10 for row in range(200)])
    hold_samples(data, result, Letters())
    taken = take_samples()
    assert len(taken) == PROMPTS * RESPONSES and {sample.group for sample in taken} == set(range(PROMPTS))
    hold_samples(data, result, None)
    assert take_samples() == []


def test_a_long_text_keeps_its_beginning_and_its_end():
    text = "a" * CHARACTERS + "z" * CHARACTERS
    assert len(shortened(text)) < CHARACTERS + 50 and shortened(text)[0] == "a" and shortened(text)[-1] == "z"
    assert shortened(text[:CHARACTERS]) == text[:CHARACTERS]


def test_what_no_page_can_hold_is_replaced():
    assert shortened("a\x00b\ud800c\n\td") == "a\ufffdb\ufffdc\n\td"


def test_the_first_and_the_last_step_are_kept_also_where_a_run_goes_back(tmp_path):
    files, sample = RunFiles(str(tmp_path)), Sample(0, "p", "r", "t", 1.0, 1)
    for step in (3, 4, 5):
        files.samples(step, [sample])
    assert [each.step for each in read_samples(tmp_path)] == [3, 5]
    files.samples(2, [sample])
    files.samples(6, [])  # a step whose rewards were not computed here
    assert [each.step for each in read_samples(tmp_path)] == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["samples.first.json", "samples.last.json"]


def test_the_highest_memory_of_each_die_is_kept(tmp_path, own_context):
    files = RunFiles(str(tmp_path))
    files.memory(3, {"update": 5, "ref": 2}, {"update": 1})
    files.memory(3, {"update": 4, "ref": 3}, {"update": 2})
    written = json.loads((tmp_path / "memory" / "3.json").read_text())
    assert written == {"rank": 3, "peak_bytes": {"update": 5, "ref": 3}, "end_bytes": {"update": 2}}
