"""Recorders keep the right choices from the hooks' calls, and both sides are compared over all ranks."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from torch import nn

from post_training.layouts.layout import LayerSlot
from post_training.mismatch.recording import recorded_training_choices
from tests.forked import PYTORCH
from tests.ranks import run_ranks
from verl_patches.features.expert_sets.keys import drawn, layer_keys, prefix_keys, set_hashes
from verl_patches.features.expert_sets.records import (
    ChoiceRecorder,
    StepChoices,
    TrainingChoiceRecorder,
    behind_a_tie,
    matched,
)
from verl_patches.features.expert_sets.training import MicroBatches

RANKS = 3


def pairs(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, np.uint64).reshape(-1, 2)


def test_only_keys_of_both_sides_are_compared():
    rollout = pairs((5, 1), (2**63 + 7, 2), (9, 3))
    compared, differing = matched(rollout, pairs((9, 3), (2**63 + 7, 4), (6, 1), (2**64 - 1, 1)))
    assert compared == 2 and differing.tolist() == [[2**63 + 7, 4]]
    assert [matched(*each)[0] for each in ((rollout, pairs()), (pairs(), rollout))] == [0, 0]


def test_ties_explain_what_lies_behind_them():
    """A tie at the third token of sequence 7 in layer 4 explains that token, later tokens and later layers."""
    ties = pairs((7, 2 << 32 | 4))
    explained = pairs((7, 2 << 32 | 4), (7, 9 << 32 | 4), (7, 2 << 32 | 60), (7, 9 << 32 | 5))
    others = pairs((7, 1 << 32 | 4), (7, 2 << 32 | 3), (7, 9 << 32 | 3), (7, 0), (8, 2 << 32 | 4))
    assert behind_a_tie(explained, ties) == 4
    assert behind_a_tie(others, ties) == behind_a_tie(explained, pairs()) == behind_a_tie(pairs(), ties) == 0


def test_recorder_keeps_the_first_choice_of_drawn_tokens():
    recorder, keys = ChoiceRecorder(), prefix_keys(np.array([4, 5, 6]))
    assert recorder.begin(keys, np.array([True, False, True]))
    recorder.record("layers.3.experts", torch.tensor([[2, 1], [3, 4], [5, 6]]), recorder.rows)
    recorder.record("layers.3.experts", torch.tensor([[7, 8]]), recorder.rows[:1])
    recorder.end()
    assert recorder.rows is None
    found = {key: value for key, value in recorder.take().tolist()}
    expected = layer_keys(keys[[0, 2]], 3).tolist(), set_hashes(np.array([[1, 2], [6, 5]])).tolist()
    assert found == dict(zip(*expected, strict=True))
    assert len(recorder.take()) == 0
    assert not recorder.begin(keys, np.zeros(3, bool))


class Router(nn.Module):
    """Routes each token to the experts that its two values name, in the format of Megatron's routers."""

    def forward(self, tokens):
        return torch.ones(tokens.shape), tokens.long()


def model_of(layers: int) -> nn.Module:
    model = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList(nn.Module() for _ in range(layers))
    for layer in model.decoder.layers:
        layer.mlp = nn.Module()
    model.decoder.layers[1].mlp.router = Router()
    return model


@pytest.mark.parametrize("tp", [1, 2])
def test_training_names_packed_tokens_and_no_padding(tp):
    """Two sequences are padded on both sides. Packed, each is padded to a multiple of the tensor-parallel size; under
    sequence parallelism a rank has its share of the rows."""
    batch = torch.tensor([[0, 11, 12, 13, 0], [0, 0, 21, 22, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 0]])
    packed = [11, 12, 13, 21, 22] if tp == 1 else [11, 12, 13, 0, 21, 22]
    expected = {}
    for sequence in ([11, 12, 13], [21, 22]):
        for token, key in zip(sequence, layer_keys(prefix_keys(np.array(sequence)), 7), strict=True):
            expected[int(key)] = int(set_hashes(np.array([[token, token + 100]]))[0])
    found = {}
    for rank in range(tp):
        recorder, model = TrainingChoiceRecorder(), model_of(2)
        slots = [LayerSlot(6, 0, 0), LayerSlot(7, 0, 1)]
        share = len(packed) // tp
        hidden = torch.tensor([[token, token + 100] for token in packed[rank * share : (rank + 1) * share]])
        with recorded_training_choices([model], slots, rank, tp, recorder):
            with MicroBatches(recorder, 1.0).forward(batch, mask, tp):
                model.decoder.layers[1].mlp.router(hidden)
            model.decoder.layers[1].mlp.router(hidden + 1)  # like a recomputation, which is not the forward
        found |= dict(recorder.take()[:, :2].tolist())
    assert found == expected


def test_chunks_of_virtual_stages_record_their_own_layers():
    """The first of two stages has two chunks with layers 0, 1, 4 and 5; the routers of 1 and 5 choose differently."""
    tokens = torch.tensor([[11, 12, 13]])
    recorder, chunks = TrainingChoiceRecorder(), [model_of(2), model_of(2)]
    slots = [LayerSlot(0, 0, 0), LayerSlot(1, 0, 1), LayerSlot(4, 1, 0), LayerSlot(5, 1, 1)]
    chosen = {1: torch.tensor([[1, 2], [3, 4], [5, 6]]), 5: torch.tensor([[7, 8], [2, 1], [6, 7]])}
    with recorded_training_choices(chunks, slots, 0, 1, recorder):
        for chunk, experts in zip(chunks, chosen.values(), strict=True):
            with MicroBatches(recorder, 1.0).forward(tokens, torch.ones_like(tokens), 1):
                chunk.decoder.layers[1].mlp.router(experts)
    expected = {}
    for layer, experts in chosen.items():
        keys = layer_keys(prefix_keys(np.array([11, 12, 13])), layer)
        expected |= dict(zip(keys.tolist(), set_hashes(experts.numpy()).tolist(), strict=True))
    assert dict(recorder.take()[:, :2].tolist()) == expected


def test_choices_of_all_ranks_are_compared(tmp_path):
    """The rollout's records are on other ranks than training's, and one of three tokens has another choice."""
    run_ranks("tests.verl_patches.features.expert_sets.test_records", RANKS, tmp_path, imported=PYTORCH)
    for rank in range(RANKS):
        plain, *with_ties = json.loads((tmp_path / f"{rank}.json").read_text())
        sixth = pytest.approx(1 / 6)
        assert plain == {"rollout/expert_sets_compared": 6.0, "rollout/expert_sets_differ": sixth}
        for metrics in with_ties:
            assert metrics == {
                "rollout/expert_sets_compared": 6.0,
                "rollout/expert_sets_differ": 0.0,
                "rollout/expert_ties_differ": sixth,
            }


def _record(recorder: ChoiceRecorder, tokens: list[int], experts: list[list[int]]) -> None:
    keys = prefix_keys(np.array(tokens))
    if isinstance(recorder, TrainingChoiceRecorder):
        recorder.begin_packed([keys], [1], 1.0)
    else:
        recorder.begin(keys, drawn(keys, 1.0))
    for layer in (1, 2):
        recorder.record(f"layers.{layer}.experts", torch.tensor(experts) + layer, recorder.rows[: len(tokens)])
        experts = [row[::-1] for row in experts]


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    choices, metrics = StepChoices(watched=True), []
    for tie in (None, (1, 1), (0, 1), (2, 2)):
        choices.training.records_ties = tie is not None
        if rank == 2:
            _record(choices.rollout, [8, 9, 10], [[1, 2], [3, 4], [5, 6]])
        if rank == 0:
            _record(choices.training, [8, 9, 10], [[1, 2], [3, 4], [5, 6]])
            # Change the choice of layer 2 for the last token by one expert.
            choices.training._found[-1][-1, 1] ^= np.uint64(1)
        if tie is not None and rank == 1:
            # Another pipeline stage of the same micro batch, whose router may choose differently at this token.
            token, layer = tie
            choices.training.begin_packed([prefix_keys(np.array([8, 9, 10]))], [1], 1.0)
            choices.training.record_ties(layer, torch.arange(4) == token, choices.training.rows)
        metrics.append(choices.metrics())
    assert choices.metrics() == {}, "a new step begins empty"
    (folder / f"{rank}.json").write_text(json.dumps(metrics))
    dist.barrier()
