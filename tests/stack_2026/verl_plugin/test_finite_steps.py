"""No update of verl's Megatron engine steps with gradients that are not finite; upstream's weights become NaN."""

import json
from typing import Any

import pytest

from tests.forked import ENGINES_2026
from tests.ranks import run_ranks
from tests.stack_2026.vllm_ascend.models import write_checkpoint

STEPPED = {"error": "", "counted": 0, "norm is finite": True, "changed": True, "finite": True}
SKIPPED = {"error": "", "counted": 1, "norm is finite": False, "changed": False, "finite": True}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each of two ranks."""
    folder = tmp_path_factory.mktemp("finite")
    write_checkpoint("qwen3moe", folder / "qwen3moe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # required by Megatron
        run_ranks("tests.stack_2026.verl_plugin.finite_steps_program", 2, folder, timeout=300, imported=ENGINES_2026)
    return [json.loads((folder / f"finite.{rank}.json").read_text()) for rank in range(2)]


def test_update_with_nonfinite_gradients_skipped_everywhere(ranks):
    """Spoil one element on one rank, of a dense weight or an expert, or overflow only the norm of finite gradients."""
    for found in ranks:
        assert found["parts"] == 2
        assert found["first"] == found["next"] == STEPPED
        assert found["nan"] == found["expert"] == found["large"] == SKIPPED


def test_run_ends_after_updates_skipped_in_a_row(ranks):
    for found in ranks:
        *skipped, last = found["row"]
        assert skipped == [SKIPPED] * 3
        assert last["error"].startswith("RunError: the last 4 updates had gradients that are not finite")


def test_nonfinite_weights_named_after_a_skipped_update(ranks):
    for found in ranks:
        assert "weights contain inf or nan in " in found["weights"]["error"] and "(rank 1)" in found["weights"]["error"]


def test_upstream_steps_to_weights_that_are_nan(ranks):
    """Control: verl's own engine steps, and counts nothing."""
    for found in ranks:
        first, second = found["stock"]
        assert first == STEPPED | {"counted": None}
        assert second == {"error": "", "counted": None, "norm is finite": False, "changed": True, "finite": False}
