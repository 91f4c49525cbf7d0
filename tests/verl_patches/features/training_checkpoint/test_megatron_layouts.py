"""Checkpoints of Megatron's own models and distributed optimizer, on 8 dies, load in every other layout: 24 pairs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from post_training.models.families import table_for
from tests.forked import MEGATRON
from tests.post_training.models.megatron import deepseek_v3_checkpoint, qwen2_checkpoint, qwen3_checkpoint
from tests.ranks import run_ranks
from tests.verl_patches.features.training_checkpoint.ranks import whole_states

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(2400)]

RANKS = 8
NAMES = {
    "deepseek_v3": ["tensor2_pipeline2_expert2", "pipeline2_expert2", "tensor2_expert4", "data8"],
    "qwen3_moe": ["tensor2_pipeline2_expert2", "tensor2_expert2", "pipeline2_expert4"],
    "qwen2": ["tensor2_pipeline2", "tensor2", "pipeline2"],
}
PAIRS = [(family, *pair) for family, names in NAMES.items() for pair in itertools.permutations(names, 2)]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, dict[str, float]]:
    """Return the folder of all checkpoints, and the losses by layout and by pair."""
    folder = tmp_path_factory.mktemp("layouts")
    for family in NAMES:
        (folder / family).mkdir()
    deepseek_v3_checkpoint.write_checkpoint_and_reference(folder / "deepseek_v3")
    qwen3_checkpoint.write_checkpoint_and_reference("qwen3_moe", folder / "qwen3_moe")
    qwen2_checkpoint.write_dense_checkpoint_and_reference(folder / "qwen2")
    (folder / "qwen2" / "dense_checkpoint").rename(folder / "qwen2" / "checkpoint")
    run_ranks(f"{__package__}.layouts_program", RANKS, folder, timeout=2300, imported=MEGATRON)
    losses = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    assert all(each == losses[0] for each in losses)
    return folder, losses[0]


def states_of(folder: Path, model: Path) -> dict[str, torch.Tensor]:
    return whole_states(folder, table_for(AutoConfig.from_pretrained(model)).shapes)


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


@pytest.mark.parametrize(("family", "before", "after"), PAIRS)
def test_another_layout_continues_from_the_same_state(run, family, before, after):
    folder, losses = run
    pair = f"{family}/{before} in {after}"
    assert losses[pair] == pytest.approx(losses[f"{family}/{before}"], rel=1e-6)
    model = folder / family / "checkpoint"
    saved = states_of(folder / family / "saved" / before, model)
    assert {name.split("/")[0] for name in saved} >= {"master", "exp_avg", "exp_avg_sq"}
    assert different(saved, states_of(folder / "again" / pair, model)) == []


@pytest.mark.parametrize("family", NAMES)
def test_two_trainings_differ(run, family):
    """The control: layouts round differently, so the compared states tell one training from another.

    Experts that received no token are left out.
    """
    folder, _ = run
    model = folder / family / "checkpoint"
    one, other = (states_of(folder / family / "saved" / name, model) for name in NAMES[family][:2])
    trained = {name for name, average in one.items() if name.startswith("exp_avg/") and average.any()}
    assert len(trained & set(different(one, other))) > len(trained) // 2
