"""Megatron's cross entropy of logits that exist stays Megatron's."""

import torch

import verl_patches.prelude_patch  # noqa: F401
from megatron_patches.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


def test_whole_logits_left_to_megatron():
    logits, labels = torch.randn(2, 8), torch.tensor([1, 2])
    given = vocab_parallel_cross_entropy(lambda *given, **named: (given, named), logits, labels, label_smoothing=0.1)
    assert given[0][0] is logits and given[0][1] is labels and given[1] == {"label_smoothing": 0.1}
