"""Resharding from FSDP2 to the rollout's layout matches transformers' files, with minimal bytes and two buckets."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forked import PYTORCH
from tests.ranks import run_ranks
from tests.stack_2026.verl_plugin.fsdp_program import BUCKET, CASES, write_models

MOST_COLLECTIVES = 40
MOST_SENT = 1.05


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp2")
    write_models(folder)
    return folder


@pytest.fixture(scope="module", params=sorted(CASES))
def found(request: pytest.FixtureRequest, checkpoints: Path) -> list[dict[str, Any]]:
    """Results of each rank, by name of the case."""
    world = request.param
    run_ranks("tests.stack_2026.verl_plugin.fsdp_program", world, checkpoints, timeout=300, imported=PYTORCH)
    return [json.loads((checkpoints / f"{world}.{rank}.json").read_text()) for rank in range(world)]


def cases_of(found: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the results of all ranks for each case."""
    return [[rank[case.name] for rank in found] for case in CASES[len(found)]]


def test_every_rollout_weight_is_that_of_transformers(found):
    for ranks in cases_of(found):
        assert [rank["first"] + rank["second"] + rank["moved"] for rank in ranks] == [[]] * len(ranks)


def test_bytes_received_are_the_bound_and_senders_share(found):
    """Check bytes received, and how evenly they are sent.

    A shard that only one rank has is sent by that rank alone, so the layout decides the balance. Replicas, or two
    ranks, share the sending evenly.
    """
    for case, ranks in zip(CASES[len(found)], cases_of(found), strict=True):
        assert [rank["bytes_received"] for rank in ranks] == [rank["bound"] for rank in ranks]
        sent = [rank["bytes_sent"] for rank in ranks]
        if case.copies == 1:
            assert sent == [rank["owed"] for rank in ranks]
        if case.copies > 1 or len(found) == 2:
            assert max(sent) * len(sent) <= MOST_SENT * sum(sent)


def test_two_buckets_of_memory_and_few_collectives(found):
    for ranks in cases_of(found):
        for rank in ranks:
            # The device's allocator rounds each block up to 512 bytes.
            assert rank["peak"] <= rank["staging_bytes"] + 4 * 512 <= 2 * BUCKET + 4 * 512
            assert rank["collectives"] <= MOST_COLLECTIVES


def test_planted_faults_leave_the_weights_not_whole(found):
    if len(found) != 2:
        pytest.skip("the faults are planted on two ranks")
    first, second = (rank["refused"] for rank in found)
    assert (first["nothing"], second["nothing"]) == ("", "")
    assert (first["wrong offset"], first["dropped shard"]) == ("", "")
    assert "weights differ from training's after update 2: model.layers.0." in second["wrong offset"]
    assert "was expected" in second["dropped shard"] and "remote/0" in second["dropped shard"]
    assert (
        first["stale version"] == second["stale version"] == "bucket whole/1 came in update 2, but whole/2 was expected"
    )
