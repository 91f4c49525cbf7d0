"""Megatron-core's parameters to the rollout's layout, with experts spread over ranks: as of `test_fsdp2`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.stack_2026.verl_plugin.fsdp_program import BUCKET
from tests.stack_2026.vllm_ascend.models import write_checkpoint

# Those of `megatron_program`, whose import would set up Megatron in this process.
WORLDS = (1, 2, 4)
MOST_SENT, MOST_COLLECTIVES = 1.05, 40


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    for model in ("qwen3", "qwen3moe", "deepseek"):
        write_checkpoint(model, folder / model)
    return folder


@pytest.mark.parametrize("world", WORLDS)
def test_weights_are_those_of_transformers_at_the_byte_bound(checkpoints, monkeypatch, world):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asserts it
    run_ranks("tests.stack_2026.verl_plugin.megatron_program", world, checkpoints, timeout=400)
    ranks = [json.loads((checkpoints / f"megatron.{world}.{rank}.json").read_text()) for rank in range(world)]
    assert len(ranks[0]) == 3
    for name in ranks[0]:
        check([rank[name] for rank in ranks])


def check(ranks: list[dict[str, Any]]) -> None:
    assert [rank["first"] + rank["second"] + rank["moved"] for rank in ranks] == [[]] * len(ranks)
    assert [rank["bytes_received"] for rank in ranks] == [rank["bound"] for rank in ranks]
    sent = [rank["bytes_sent"] for rank in ranks]
    assert max(sent) * len(sent) <= MOST_SENT * sum(sent)
    for rank in ranks:
        assert rank["peak"] <= 2 * BUCKET + 4 * 512 and rank["collectives"] <= MOST_COLLECTIVES
