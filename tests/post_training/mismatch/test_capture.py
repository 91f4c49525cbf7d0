"""The batch that is sent through verl's workers, the sequences that it rejects, and the recording of log-probs."""

import sys
from types import SimpleNamespace

import pytest
import torch

from post_training.mismatch import capture
from post_training.mismatch.dumps import TokenSequence
from post_training.mismatch.points import LOG_PROBS
from post_training.mismatch.recording import NO_TOKEN, Recorder

PADDING = 9
SEQUENCES = [TokenSequence((1, 2), (3,)), TokenSequence((4, 5, 6), (7, 8))]


def worker(prompt_length: int = 4, response_length: int = 2) -> SimpleNamespace:
    rollout = SimpleNamespace(prompt_length=prompt_length, response_length=response_length)
    return SimpleNamespace(
        config=SimpleNamespace(rollout=rollout),
        tokenizer=SimpleNamespace(pad_token_id=PADDING),
        hf_config=SimpleNamespace(architectures=["A", "B"], num_hidden_layers=3),
        dtype=torch.bfloat16,
    )


@pytest.fixture
def batch(monkeypatch):
    """A function that returns verl's batch as its tensors."""
    tensors = SimpleNamespace(from_dict=lambda tensors: {name: each.tolist() for name, each in tensors.items()})
    monkeypatch.setitem(sys.modules, "verl", SimpleNamespace(DataProto=tensors))
    return lambda response_length: capture._batch(worker(), SEQUENCES, response_length)


def test_prompts_are_padded_on_their_left_and_responses_on_their_right(batch):
    assert batch(2) == {
        "input_ids": [[9, 9, 1, 2, 3, 9], [9, 4, 5, 6, 7, 8]],
        "attention_mask": [[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]],
        "position_ids": [[0, 0, 0, 1, 2, 2], [0, 0, 1, 2, 3, 4]],
        "responses": [[3, 9], [7, 8]],
    }


def test_prompts_alone_have_no_responses(monkeypatch, batch):
    monkeypatch.setattr(sys.modules[__name__], "SEQUENCES", [TokenSequence((1, 2), ())])
    assert batch(0) == {
        "input_ids": [[9, 9, 1, 2]], "attention_mask": [[0, 0, 1, 1]], "position_ids": [[0, 0, 0, 1]]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "response", "says"),
    [
        ((1, 2, 3, 4), (5, 6), None),
        ((1, 2, 3, 4, 5), (5, 6), "sequence 2 has 5 and 2 tokens, but the batch allows 4 and 2. Use shorter ones"),
        ((1,), (5, 6, 7), "sequence 2 has 1 and 3 tokens, but the batch allows 4 and 2. Use shorter ones"),
        ((PADDING, 1), (5,), "the prompt of sequence 2 begins with the padding token 9. Remove it"),
        ((1, PADDING), (PADDING,), None),
    ],
)
def test_sequences_longer_than_the_batch_rejected(prompt, response, says):
    given = [SEQUENCES[0], TokenSequence(prompt, response)]
    if says is None:
        return capture.check_lengths(worker().config, given, PADDING)
    with pytest.raises(ValueError, match=f"^{says}$"):
        capture.check_lengths(worker().config, given, PADDING)


def test_log_probs_are_those_of_the_response_and_copies_of_sequences_are_left_out():
    recorder = Recorder(SEQUENCES)
    recorded = []
    recorder.record = lambda *given: recorded.append(given)
    capture._record_log_probs(recorder, torch.tensor([[0.3, 0.4], [0.5, 0.6]]), range(1, 3))
    ((point, values, rows),) = recorded
    assert point == LOG_PROBS and torch.equal(values, torch.tensor([[0.3], [0.4], [0.5], [0.6]]))
    assert rows.tolist() == [*recorder.response_rows(1), NO_TOKEN, NO_TOKEN]
    recorded.clear()
    capture._record_log_probs(recorder, torch.tensor([[0.3, 0.4]]), range(1))
    assert recorded[0][2].tolist() == [*recorder.response_rows(0), NO_TOKEN]


def test_a_header_says_what_computed():
    header = capture.header_of(worker(), "rollout", 0.5, "a run")
    assert (header.side, header.dtype, header.temperature, header.about) == ("rollout", "bfloat16", 0.5, "a run")
    assert "A" in vars(header).values() and 3 in vars(header).values()
