"""Synthetic dumps of a model with experts, and copies of them with one change."""

from __future__ import annotations

from dataclasses import replace

import torch

from post_training.mismatch import points
from post_training.mismatch.dumps import Captured, Dump, Header, TokenSequence
from post_training.mismatch.points import of_layer

SEQUENCES = (TokenSequence((3, 4, 5), (6, 7)), TokenSequence((8, 9), (10, 11, 12)))
TOKENS, WIDTH, LAYERS, EXPERTS, CHOSEN = 10, 8, 2, 16, 2
PREDICTING = torch.tensor([2, 3, 6, 7, 8])


def dump(side="training", dtype="float32", seed=0):
    """Make one side's dump; another seed changes all of its values."""
    draw = torch.Generator().manual_seed(seed)

    def values(width, rows=TOKENS):
        return torch.randn(rows, width, generator=draw).to(getattr(torch, dtype))

    every = torch.arange(TOKENS)
    found = {points.EMBEDDING: Captured(every, values(WIDTH)), points.FINAL_NORM: Captured(every, values(WIDTH))}
    for layer in range(LAYERS):
        for part in points.OF_A_LAYER:
            width = EXPERTS if part == points.ROUTER_LOGITS else WIDTH
            found[of_layer(layer, part)] = Captured(every, values(width))
        logits = found[of_layer(layer, points.ROUTER_LOGITS)].values
        found[of_layer(layer, points.EXPERTS)] = Captured(every, logits.float().topk(CHOSEN).indices)
    found[points.LOGITS] = Captured(PREDICTING, values(20, len(PREDICTING)))
    found[points.LOG_PROBS] = Captured(PREDICTING, -values(1, len(PREDICTING)).abs())
    return Dump(Header(side, dtype, "TinyForCausalLM", LAYERS, 1.0), SEQUENCES, found)


def changed(given, point, change, rows=None):
    """Return a copy of `given` with `change` applied to a point's values, for all tokens or for `rows`."""
    captured = given.points[point]
    values = captured.values.clone()
    chosen = slice(None) if rows is None else torch.isin(captured.rows, torch.tensor(rows))
    values[chosen] = change(values[chosen])
    return replace(given, points={**given.points, point: Captured(captured.rows, values)})
