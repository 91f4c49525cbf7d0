"""The states of MindSpeed's own optimizers are saved and loaded bit for bit: of the fused and of the swapping one.

Needs checkouts: ``bash scripts/test.sh tests/upstream --upstream FOLDER`` (see README.md here).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from post_training.models.families import table_for
from tests.upstream.test_engine import run_ranks
from tests.verl_patches.features.training_checkpoint.ranks import whole_states

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # the first test may have to wait for a compiler

LAYOUT = {"name": "TP2 x EP2", "tensor": 2, "expert": 2}
# Whether the optimizer swaps, and from whose checkpoint the run resumes.
RUNS = {"fused": (False, None), "swapping": (True, None), "fused after swapping": (False, "swapping")}


@pytest.fixture(scope="module")
def runs(packages, tmp_path_factory) -> dict[str, tuple[Path, list[dict]]]:
    """Return each run's folder with its saved steps, and each rank's description of its optimizer."""
    from tests.post_training.models.megatron.deepseek_v3_checkpoint import write_checkpoint_and_reference

    model = tmp_path_factory.mktemp("deepseek_v3")
    write_checkpoint_and_reference(model)
    found: dict[str, tuple[Path, list[dict]]] = {}
    for name, (swap, before) in RUNS.items():
        folder = tmp_path_factory.mktemp("case") / "run"
        asked = {"layout": LAYOUT, "swap": swap, "from": before and str(found[before][0] / "saved")}
        found[name] = folder, run_ranks("checkpoint_program", asked, packages, model, folder)
    return found


def states(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return whole_states(folder / name, table_for(AutoConfig.from_pretrained(folder / "checkpoint")).shapes)


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> float:
    """Return the largest distance between two states of a tensor, relative to the first one's distance to `before`."""
    ways = {name: (one[name].double() - before[name].double()).norm() for name in one}
    return max(float((one[name].double() - other[name].double()).norm() / way) for name, way in ways.items() if way)


def test_the_optimizers_are_mindspeeds(runs):
    for name, (_, said) in runs.items():
        for form in said:
            print(name, form)
            assert (form["classes"] == ["SwapDistributedOptimizer"]) is RUNS[name][0]
            assert form["away"] == (form["shards"] if RUNS[name][0] else 0) and form["shards"] > 10
            assert form["step in group"] == (0 if RUNS[name][0] else form["shards"])


@pytest.mark.parametrize("name", RUNS)
def test_what_was_saved_is_loaded_and_trains_on_as_if_unbroken(runs, name):
    folder, before = runs[name][0], RUNS[name][1]
    saved = states(runs[before][0] if before else folder, "saved")
    assert {key.split("/")[0] for key in saved} >= {"master", "exp_avg", "exp_avg_sq"}
    assert different(saved, states(folder, "again")) == []
    later, unbroken = states(folder, "resumed"), states(runs[before][0] if before else folder, "unbroken")
    if before:
        # Another kernel made the last two steps; its last bit depends on the host's processor.
        furthest = apart(unbroken, later, saved)
        print(f"apart by {furthest:.1e} of what the two steps change")
        assert furthest < 0.01
    else:
        assert different(unbroken, later) == []
    # The controls: two more steps change the compared states.
    assert len(different(saved, later)) > len(saved) // 4
    assert apart(unbroken, saved, saved) == 1
