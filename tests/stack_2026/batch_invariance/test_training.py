"""The training forward gives the log-probs of vLLM-Ascend's batch-invariant rollout, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.forked import PYTORCH
from tests.ranks import run_ranks
from tests.stack_2026.batch_invariance.engines import Engines
from tests.stack_2026.vllm_ascend.models import write_checkpoint
from verl_plugin.batch_invariance.jobs import Job
from verl_plugin.rollout import WORKER

pytestmark = pytest.mark.slow
MODELS = ["qwen2.5", "qwen3", "qwen3moe"]


@pytest.fixture(scope="module")
def all_found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, answers = tmp_path_factory.mktemp("training"), {}
    engines = Engines(folder)
    for model in MODELS:
        write_checkpoint(model, folder / model)
        job = Job(str(folder / model), search=False, worker=WORKER)
        answers[model] = engines.run(job, "1")["alone"]
        (folder / f"answer-{model}.json").write_text(json.dumps(answers[model]))
    engines.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_EMULATOR_DEVICES", "1")
        run_ranks("tests.stack_2026.batch_invariance.training_program", 1, folder, timeout=500, imported=PYTORCH)
    return {
        model: json.loads((folder / f"training-{model}.json").read_text()) | {"rollout": answers[model]["log_probs"]}
        for model in MODELS
    }


@pytest.fixture(params=MODELS)
def found(request, all_found) -> dict[str, Any]:
    return all_found[request.param]


@pytest.mark.parametrize("batch", ["whole", "padded", "packed"])
def test_log_probs_equal_those_of_the_rollout(found, batch):
    assert found[batch] == found["rollout"] and len(found["rollout"]) == 12


@pytest.mark.parametrize("forward", ["plain", "plain attention"])
def test_other_forwards_are_a_rounding_apart(found, forward):
    distances = [abs(one - other) for one, other in zip(found[forward], found["rollout"], strict=True)]
    assert 0 < max(distances) < 1e-5


def test_gradients_are_those_of_plain_attention(found):
    assert found["gradients apart"] < 1e-4 and found["parameters"] >= 25
