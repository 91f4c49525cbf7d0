"""A recorded step is replayed, and differences are located: stage, sample, rank, layer and operator."""

import json
from typing import Any

import pytest

from tests.forked import ENGINES_2026
from tests.ranks import run_ranks
from tests.stack_2026.step_record.poisoned import LAYER
from tests.stack_2026.step_record.steps import FAULTS, recorded
from tests.stack_2026.vllm_ascend.models import write_checkpoint
from verl_plugin.step_record.folder import write_record

RANKS = 2
# The first stage that differs, and how many of its values do.
FOUND = {
    "swapped": ("ref", {8}),
    "mask": ("mask", {1}),
    "advantage": ("advantages", {1}),
    "stale": ("old_log_prob", {30}),
    "norm": ("update", {1}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Results of each rank, by step."""
    folder = tmp_path_factory.mktemp("steps")
    write_checkpoint("qwen3", folder / "qwen3")
    right = recorded(folder / "qwen3", RANKS)
    for name, fault in FAULTS.items():
        write_record(folder / name, fault(right), None, most_mib=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES", raising=False)
        run_ranks("tests.stack_2026.step_record.program", RANKS, folder, timeout=300, imported=ENGINES_2026)
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(RANKS)] for name in FAULTS
    }


def test_step_of_transformers_is_made_again(results):
    """Compare log-probs, advantages, losses and gradient norm of verl on two dies with transformers' on the host."""
    for found in results["right"]:
        assert [each for each in found["compared"] if each["apart"]] == []
        stages = [each["stage"] for each in found["compared"]]
        assert stages == ["mask", "ref", *["old_log_prob"] * 2, "advantages", *["update"] * 3]


@pytest.mark.parametrize("fault", FOUND)
def test_fault_is_found_in_its_stage(results, fault):
    for found in results[fault]:
        first = next(each for each in found["compared"] if each["apart"])
        assert (first["stage"], {first["apart"]}) == FOUND[fault], first


def test_layer_and_operator_of_a_gradient_that_is_not_finite_are_found(results):
    first, last = (found["origins"] for found in results["poisoned"])
    assert "aten.mul.Tensor" in last["update"] and "rank 1: " in last["update"]
    assert f"in the backward of {LAYER}" in last["update"], last
    assert "rank 1" not in str(first)
