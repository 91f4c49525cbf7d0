"""verl's engines with the rollout's experts match transformers with the same experts, and count differing ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ENGINES_2026
from tests.ranks import run_ranks
from tests.stack_2026.routing_replay.program import COMPARED, LENGTHS, REPLAYED, UPSTREAM, Case
from tests.stack_2026.routing_replay.reference import write_models

# Largest difference of log-probs near -5, in float32.
TOLERANCE = 2e-6
APART = 0.05
COMPARED_METRIC, DIFFER, REPLACED, BYTES = (
    f"rollout/expert_{name}" for name in ("sets_compared", "sets_differ", "sets_replaced", "ids_bytes")
)
# 2 layers of 4 experts, one byte each.
SAMPLE_BYTES = sum(LENGTHS) * 2 * 4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routing")
    write_models(folder)
    return folder


@pytest.fixture(scope="module", params=sorted(REPLAYED))
def found(request: pytest.FixtureRequest, checkpoints: Path) -> list[dict[str, Any]]:
    """Results of each rank, by name of the case."""
    world = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # required by Megatron
        patch.setenv("OMP_NUM_THREADS", "1")
        run_ranks("tests.stack_2026.routing_replay.program", world, checkpoints, timeout=500, imported=ENGINES_2026)
    return [json.loads((checkpoints / f"{world}.{rank}.json").read_text()) for rank in range(world)]


def of_case(found: list[dict[str, Any]], case: Case) -> list[dict[str, Any]]:
    """Return a case's results on the ranks that hold the outputs of their samples."""
    return [rank[case.name] for rank in found if rank[case.name]["sources"]]


def compared_in(case: Case) -> int:
    """Return the count of tokens x MoE layers whose experts the rollout knows, in the forward and in the update."""
    return 2 * (sum(LENGTHS) - len(LENGTHS)) * (1 if case.model == "deepseek" else 2)


def test_log_probs_are_those_of_the_given_experts(found):
    for case in REPLAYED[len(found)]:
        for rank in of_case(found, case):
            assert rank["wanted"] < TOLERANCE and rank["plain"] > APART, (case, rank)


def test_gradients_are_those_of_the_given_experts(found):
    for case in REPLAYED[len(found)]:
        ranks = [rank[case.name]["gradient"] for rank in found if "gradient" in rank[case.name]]
        assert ranks and max(ranks) < 1e-5, (case, ranks)


def test_replay_leaves_no_token_with_other_experts(found):
    for case in REPLAYED[len(found)]:
        for rank in of_case(found, case):
            metrics = rank["metrics"]
            assert metrics[DIFFER] == 0 and metrics[REPLACED] == 1, (case, metrics)
            assert metrics[COMPARED_METRIC] == compared_in(case), (case, metrics)
            assert metrics[BYTES] == SAMPLE_BYTES, (case, metrics)


def test_without_replay_others_are_counted(found):
    for case in COMPARED[len(found)]:
        [rank] = of_case(found, case)
        metrics, others = rank["metrics"], float(case.given == "random")
        assert metrics[DIFFER] == (0 if case.mode == "R3" else others) and metrics[REPLACED] == others, (case, metrics)
        assert metrics[COMPARED_METRIC] == compared_in(case)
        assert (rank["wanted"] > APART) == bool(others) and rank["plain"] < TOLERANCE, (case, rank)


def test_reference_replays_beside_the_actor(found):
    cases = [case for case in REPLAYED[len(found)] if case.reference]
    assert cases or len(found) > 1
    for case in cases:
        assert found[0][case.name]["reference"] < TOLERANCE


def test_packed_rows_are_those_of_verl(found):
    """Check one rank, and two tensor-parallel ranks that split packed samples like MindSpeed's layers."""
    assert all(rank["placed as verl"] for rank in found)


def test_upstream_alone_replays_no_padded_batch(found):
    """Show why Megatron's engine is extended: verl lays experts out as in packed batches and loses the first model."""
    for case in UPSTREAM[len(found)]:
        upstream = found[0][case.name]
        assert "Router replay tensors are not aligned" in upstream["error"]
        assert upstream["routers"] == 2 and upstream["reached"] == 0
