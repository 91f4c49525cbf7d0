"""The training models equal transformers' on the same fp32 weights: DeepSeek-V3 in every layout, Qwen2 in one."""

import json
from pathlib import Path

import pytest

from tests.forked import MEGATRON
from tests.post_training.models.megatron.deepseek_v3_checkpoint import write_checkpoint_and_reference
from tests.post_training.models.megatron.qwen2_checkpoint import write_dense_checkpoint_and_reference
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

RANKS = 4
LOGITS_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 2e-5
WEIGHT_TOLERANCE = 1e-5
NOTICEABLE = 1e-3

LAYOUT_NAMES = [
    "data4",
    "tensor2",
    "pipeline2",
    "tensor2_pipeline2",
    "tensor2_expert2",
    "expert4",
    "pipeline2_expert2",
    "tensor2_recompute",
]
FAULT_NAMES = [
    "mscale dropped",
    "group limit dropped",
    "scaling factor dropped",
    "yarn dropped",
    "expert bias dropped",
    "gradients not summed over tensor-parallel ranks",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("deepseek_v3")
    write_checkpoint_and_reference(folder)
    write_dense_checkpoint_and_reference(folder)
    run_ranks("tests.post_training.models.megatron.training_models_program", RANKS, folder, imported=MEGATRON)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def hf_names() -> set[str]:
    from tests.post_training.models.megatron.deepseek_v3_checkpoint import build_model

    return {name for name, _ in build_model().named_parameters()}


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_logits_equal_transformers(results, layout):
    errors = [error for rank in results if (error := rank["layouts"][layout]["logits"]) is not None]
    assert errors and max(errors) < LOGITS_TOLERANCE


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_every_gradient_equals_transformers(results, hf_names, layout):
    seen: dict[str, float] = {}
    for rank in results:
        for name, error in rank["layouts"][layout]["gradients"].items():
            seen[name] = max(error, seen.get(name, 0.0))
    assert set(seen) == hf_names
    worst = max(seen, key=seen.get)
    assert seen[worst] < GRADIENT_TOLERANCE, f"{worst}: {seen[worst]:.2e}"


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_distributed_optimizer_takes_the_step_of_adam(results, layout):
    for rank in results:
        step = rank["steps"][layout]
        assert step["norm"] == pytest.approx(rank["norm"], rel=1e-5)
        assert max(step["weights"].values()) < WEIGHT_TOLERANCE


@pytest.mark.parametrize("fault", FAULT_NAMES)
def test_wrong_model_detected(results, fault):
    assert max(rank["faults"][fault] for rank in results) > NOTICEABLE


def test_dense_qwen2_equals_transformers(results):
    logits = [rank["dense"]["logits"] for rank in results if rank["dense"]["logits"] is not None]
    gradients = {name: error for rank in results for name, error in rank["dense"]["gradients"].items()}
    assert len(logits) == 2 and max(logits) < LOGITS_TOLERANCE
    assert len(gradients) == 2 and max(gradients.values()) < GRADIENT_TOLERANCE
