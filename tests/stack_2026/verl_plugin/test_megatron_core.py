"""Resharding from Megatron-core's layouts to the rollout's, with the checks of `test_fsdp2`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forked import PYTORCH
from tests.ranks import run_ranks
from tests.stack_2026.verl_plugin.fsdp_program import BUCKET, write_models

# Runs of `megatron_program` and their numbers of ranks; importing it would set up Megatron in this process.
RUNS = {"one": 1, "experts": 2, "experts over four": 4, "tensors": 2, "tensors and layers": 4}
MOST_SENT, MOST_COLLECTIVES = 1.05, 40


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    write_models(folder)
    return folder


@pytest.mark.parametrize(("name", "world"), RUNS.items())
def test_weights_are_transformers_and_upstreams_at_the_bound(checkpoints, monkeypatch, name, world):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # required by Megatron
    (checkpoints / "run.txt").write_text(name)
    run_ranks("tests.stack_2026.verl_plugin.megatron_program", world, checkpoints, timeout=400, imported=PYTORCH)
    ranks = [json.loads((checkpoints / f"megatron.{name}.{rank}.json").read_text()) for rank in range(world)]
    assert len(ranks[0]) >= 3
    for case in ranks[0]:
        check([rank[case] for rank in ranks], even="layers" not in name)


def check(ranks: list[dict[str, Any]], even: bool) -> None:
    """Check weights, bytes and memory. `even`: all ranks have as much; stages do not (embedding, output layer)."""
    assert [rank["first"] + rank["second"] + rank["upstream"] + rank["moved"] for rank in ranks] == [[]] * len(ranks)
    assert [rank["bytes_received"] for rank in ranks] == [rank["bound"] for rank in ranks]
    sent = [rank["bytes_sent"] for rank in ranks]
    assert not even or max(sent) * len(sent) <= MOST_SENT * sum(sent)
    for rank in ranks:
        assert rank["peak"] <= 2 * BUCKET + 4 * 512 and rank["collectives"] <= MOST_COLLECTIVES
