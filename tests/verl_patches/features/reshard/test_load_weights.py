"""Reshards between generated pairs of layouts match upstream's own `load_weights` byte for byte, on emulated dies.

An ordinary run takes a subset that covers every axis. For all pairs, run `pytest --exhaustive` on this file.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.forked import MEGATRON
from tests.post_training.models.small_models import SMALL_MODELS, write_models
from tests.ranks import run_ranks

AXES = {
    "pipeline stages",
    "stages of different lengths",
    "virtual stages",
    "TP grows",
    "TP shrinks",
    "several instances",
    "experts over TP x EP",
    "experts over EP, cut over TP",
    "EP in training above rollout",
    "EP in training below rollout",
    "one dense layer first",
    "two dense layers first",
    "shared expert replicated",
    "shared expert cut",
    *SMALL_MODELS,
}


def hold_against_upstream(folder: Path, world: int, train_layouts: int, every: int) -> Counter:
    """Return the number of pairs with each property; fail with the ranks' output if one byte differs."""
    write_models(folder)
    request = {"models": list(SMALL_MODELS), "train_layouts": train_layouts, "every": every}
    (folder / "request.json").write_text(json.dumps(request))
    run_ranks("tests.verl_patches.features.reshard.load_weights_program", world, folder, imported=MEGATRON)
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    assert all(result == results[0] for result in results)
    assert results[0]["wrong bytes found"]
    return Counter(results[0]["covered"])


@pytest.mark.slow
def test_generated_pairs_equal_load_weights(tmp_path: Path) -> None:
    covered = hold_against_upstream(tmp_path, world=4, train_layouts=3, every=3)
    assert covered["pairs"] >= 20
    assert AXES <= covered.keys(), AXES - covered.keys()


@pytest.mark.exhaustive
def test_two_hundred_generated_pairs_equal_load_weights(tmp_path: Path) -> None:
    covered = Counter()
    for world in (2, 4, 8):
        (tmp_path / str(world)).mkdir()
        covered += hold_against_upstream(tmp_path / str(world), world, train_layouts=3, every=1)
    print(json.dumps(covered, indent=1))
    assert covered["pairs"] >= 200
    assert AXES | {"key heads shared by ranks"} <= covered.keys()
