"""MindSpeed's part of the cross entropy, computed in the logits' memory, equals Megatron's own."""

import pytest
import torch

import verl_patches.prelude_patch  # noqa: F401
from mindspeed_patches.core.tensor_parallel.cross_entropy import calculate_predicted_logits

NAMES = ("elsewhere", "columns", "predicted", "sum", "exponentials")


def never(*_: object) -> None:
    raise AssertionError("MindSpeed's own function was called")


@pytest.mark.parametrize("first", [0, 6, 12], ids="shard from {}".format)
def test_parts_equal_megatron(first):
    """Use labels inside, below and above a rank's vocabulary shard of six."""
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 4, 6, generator=generator) * 5
    labels = torch.randint(0, 18, (3, 4), generator=generator)
    maximum = logits.amax(-1) + 1
    expected = VocabParallelCrossEntropy.calculate_predicted_logits(logits.clone(), labels, maximum, first, first + 6)
    found = calculate_predicted_logits(never, logits.clone(), labels, maximum, first, first + 6)
    for name, mine, megatrons in zip(NAMES, found, expected, strict=True):
        assert torch.equal(mine, megatrons), name


def test_exponentials_written_into_the_logits():
    logits = torch.randn(2, 8)
    *_, exponentials = calculate_predicted_logits(never, logits, torch.tensor([1, 9]), logits.amax(-1), 0, 8)
    assert exponentials.data_ptr() == logits.data_ptr()


def test_labels_unchanged():
    labels = torch.tensor([1, 9])
    calculate_predicted_logits(never, torch.randn(2, 8), labels, torch.zeros(2), 4, 12)
    assert labels.tolist() == [1, 9]


def test_other_types_left_to_mindspeed():
    """In bfloat16 each step would round, so the patch leaves it to MindSpeed."""
    logits = torch.randn(2, 8).bfloat16()
    kept = logits.clone()
    given = calculate_predicted_logits(lambda *given: given, logits, torch.tensor([1, 2]), logits.amax(-1), 0, 8)
    assert given[0] is logits and torch.equal(logits, kept) and given[3:] == (0, 8)
