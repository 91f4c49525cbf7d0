"""Finite gradients with an overflowing norm: Megatron's own optimizers on two dies, and verl's on FSDP."""

from __future__ import annotations

import json

import pytest

from tests.forked import MEGATRON
from tests.ranks import run_ranks

CASES = [
    f"{role} {kind} {clip}" for role in ("actor", "critic") for kind in ("dense", "experts") for clip in (1.0, 0.0)
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, dict]]:
    folder = tmp_path_factory.mktemp("norm")
    run_ranks("tests.verl_patches.features.nonfinite.norm_program", 2, folder, 300, imported=MEGATRON)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_overflowing_norm_skips_on_every_rank(ranks, case):
    """This holds with and without clipping; without it a single optimizer computes no norm, but a chain does."""
    role = case.split()[0]
    for found in (rank[case] for rank in ranks):
        assert found["parts"] == (2 if "experts" in case else 1)
        assert found["elements_finite"] and not found["overflowing"]["finite_norm"]
        assert found["overflowing"]["counts"] == {f"{role}/nonfinite_steps": 1} and found["unchanged"]
        for ordinary in (found["first"], found["after"]):
            assert ordinary == {"finite_norm": True, "counts": {f"{role}/nonfinite_steps": 0}}
        assert found["learns"] and found["unguarded_changes"]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_fsdp_counts_overflowing_norm_alike(ranks, role):
    for found in (rank[f"{role} FSDP"] for rank in ranks):
        assert found["overflowing"] == {"finite_norm": False, "counts": {f"{role}/nonfinite_steps": 1}}
        assert found["after"] == {"finite_norm": True, "counts": {f"{role}/nonfinite_steps": 0}}
        assert found["overflowing_unchanged"] and not found["after_unchanged"]
