"""Fused attention in a captured graph, replaced between replays, as vLLM-Ascend 0.23 does in full graphs."""

from __future__ import annotations

import pytest
import torch
import torch_npu

SEQUENCES, HEADS, KEY_HEADS, SIZE, BLOCK = 3, 4, 2, 128, 128
CAPTURED, NEXT, LAST = [1, 1, 1], [5, 9, 7], [128, 2, 64]


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "query": torch.randn(SEQUENCES, HEADS, SIZE).npu(),
        "key": torch.randn(8, BLOCK, KEY_HEADS * SIZE).npu(),
        "value": torch.randn(8, BLOCK, KEY_HEADS * SIZE).npu(),
        "block_table": torch.tensor([[1], [2], [3]], dtype=torch.int32).npu(),
        "atten_mask": torch.triu(torch.ones(2048, 2048), 1).to(torch.int8).npu(),
    }


def arguments(tensors: dict[str, torch.Tensor], lengths: list[int]) -> dict:
    return tensors | {
        "input_layout": "TND", "block_size": BLOCK, "actual_seq_lengths": [1, 2, 3], "actual_seq_lengths_kv": lengths,
        "num_key_value_heads": KEY_HEADS, "num_heads": HEADS, "scale": SIZE**-0.5, "sparse_mode": 3,
    }  # fmt: skip


def expected(tensors: dict[str, torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """Compute the attention of each sequence's last query over its keys, in plain torch."""
    rows = []
    for number, length in enumerate(lengths):
        block = int(tensors["block_table"][number, 0])
        key, value = (
            tensors[name].cpu()[block, :length].view(length, KEY_HEADS, SIZE).double().repeat_interleave(2, 1)
            for name in ("key", "value")
        )
        scores = torch.einsum("hd,khd->hk", tensors["query"].cpu()[number].double(), key) * SIZE**-0.5
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), value))
    return torch.stack(rows)


class Captured:
    """A graph that consists of fused attention, and waits at each replay for an event that an update records."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors = tensors
        self.graph, self.stream = torch.npu.NPUGraph(), torch.npu.Stream()
        self.out, self.sums = torch.empty_like(tensors["query"]), torch.empty(1, device="npu")
        given = arguments(tensors, CAPTURED)
        self.workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(**given)
        with torch.npu.graph(self.graph, stream=torch.npu.Stream()):
            current = torch.npu.current_stream()
            self.event = torch.npu.ExternalEvent()
            self.event.wait(current)
            self.event.reset(current)
            torch.npu.graph_task_group_begin(current)
            self.attend(CAPTURED)
            self.handle = torch.npu.graph_task_group_end(current)

    def attend(self, lengths: list[int]) -> None:
        torch_npu.npu_fused_infer_attention_score.out(
            **arguments(self.tensors, lengths), workspace=self.workspace, out=[self.out, self.sums]
        )

    def update(self, lengths: list[int]) -> None:
        with torch.npu.stream(self.stream):
            torch.npu.graph_task_update_begin(self.stream, self.handle)
            self.attend(lengths)
            torch.npu.graph_task_update_end(self.stream)
            self.event.record(self.stream)


@pytest.fixture(scope="module")
def captured(tensors) -> Captured:
    return Captured(tensors)


def check(found: Captured, lengths: list[int]) -> None:
    torch.npu.synchronize()
    torch.testing.assert_close(found.out.cpu().double(), expected(found.tensors, lengths), atol=1e-5, rtol=1e-5)


def test_replay_waits_for_the_update_that_is_asked_for_later(captured):
    for lengths in (NEXT, LAST, CAPTURED):
        captured.graph.replay()
        captured.update(lengths)
        check(captured, lengths)


def test_update_before_the_replay_is_used(captured):
    for lengths in (LAST, NEXT):
        captured.update(lengths)
        captured.graph.replay()
        check(captured, lengths)
