"""The training forward gives the log-probs of vLLM-Ascend's batch-invariant rollout, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.forked import PYTORCH
from tests.ranks import run_ranks
from tests.stack_2026.batch_invariance.engines import run_engine
from tests.stack_2026.vllm_ascend.models import write_checkpoint
from verl_plugin.batch_invariance.jobs import Job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("training")
    write_checkpoint("qwen3", folder / "qwen3")
    answer = run_engine(Job(str(folder / "qwen3"), search=False), "1", folder / "engine")["alone"]
    (folder / "answer.json").write_text(json.dumps(answer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_EMULATOR_DEVICES", "1")
        run_ranks("tests.stack_2026.batch_invariance.training_program", 1, folder, timeout=500, imported=PYTORCH)
    return json.loads((folder / "training.json").read_text()) | {"rollout": answer["log_probs"]}


@pytest.mark.parametrize("batch", ["whole", "padded", "packed"])
def test_log_probs_equal_those_of_the_rollout(found, batch):
    assert found[batch] == found["rollout"] and len(found["rollout"]) == 12


@pytest.mark.parametrize("forward", ["plain", "plain attention"])
def test_other_forwards_are_a_rounding_apart(found, forward):
    distances = [abs(one - other) for one, other in zip(found[forward], found["rollout"], strict=True)]
    assert 0 < max(distances) < 1e-5


def test_gradients_are_those_of_plain_attention(found):
    assert found["gradients apart"] < 1e-5 and found["parameters"] == 25
