"""Prints how training's attention rejects calls, as JSON. Importing it replaces products for the whole process."""

import json
from types import SimpleNamespace
from unittest import mock

import torch

from verl_plugin.batch_invariance import training

HEADS = torch.zeros(1, 2, 3, 8)


def said(module: object, parts: int = 1, **named: object) -> str:
    """Return the error of a call in which `parts` ranks share a sequence."""
    with mock.patch.object(training, "get_ulysses_sequence_parallel_world_size", lambda: parts):
        try:
            training.attention(module, HEADS, HEADS, HEADS, None, **named)
        except ValueError as error:
            return str(error)
    return ""


causal = SimpleNamespace(is_causal=True)
print(
    json.dumps(
        {
            "dropout": said(causal, dropout=0.1),
            "asked": said(causal, is_causal=False),
            "module": said(SimpleNamespace(is_causal=False)),
            "part": said(causal, parts=2),
        }
    )
)
