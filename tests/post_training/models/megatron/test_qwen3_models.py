"""Qwen3 and Qwen3-MoE on Megatron equal transformers' on the same fp32 weights: logits and every gradient."""

import json
from pathlib import Path

import pytest

from tests.forked import MEGATRON
from tests.post_training.models.megatron.qwen3_checkpoint import write_checkpoint_and_reference
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

RANKS = 4
TOLERANCE = 2e-5
NOTICEABLE = 1e-3
LAYOUTS = {
    "qwen3": ["data4", "tensor2", "tensor2_pipeline2"],
    "qwen3_moe": ["data4", "tensor2", "tensor2_pipeline2", "tensor2_expert2", "pipeline2_expert2"],
}
NAMED = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], dict[str, set[str]]]:
    """Results of every rank, and the names of each model's weights."""
    folder: Path = tmp_path_factory.mktemp("qwen3")
    names = {}
    for name in LAYOUTS:
        (folder / name).mkdir()
        names[name] = write_checkpoint_and_reference(name, folder / name)
    run_ranks("tests.post_training.models.megatron.qwen3_program", RANKS, folder, imported=MEGATRON)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)], names


@pytest.mark.parametrize(("name", "layout"), NAMED)
def test_logits_equal_transformers(measured, name, layout):
    errors = [rank[name]["layouts"][layout]["logits"] for rank in measured[0]]
    found = [error for error in errors if error is not None]
    assert found and max(found) < TOLERANCE


@pytest.mark.parametrize(("name", "layout"), NAMED)
def test_every_gradient_equals_transformers(measured, name, layout):
    ranks, names = measured
    seen: dict[str, float] = {}
    for rank in ranks:
        for weight, error in rank[name]["layouts"][layout]["gradients"].items():
            seen[weight] = max(error, seen.get(weight, 0.0))
    assert set(seen) == names[name]
    worst = max(seen, key=lambda weight: seen[weight])
    assert seen[worst] < TOLERANCE, f"{worst}: {seen[worst]:.2e}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_wrong_model_detected(measured, name):
    assert max(rank[name]["fault"] for rank in measured[0]) > NOTICEABLE
