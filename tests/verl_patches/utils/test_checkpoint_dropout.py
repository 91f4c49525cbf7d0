"""A resumed run with dropout drops the same elements as the unbroken one, by Megatron's random number tracker."""

from __future__ import annotations

import json

from tests.forked import MEGATRON
from tests.ranks import run_ranks


def test_dropout_continues_after_a_resume(tmp_path):
    run_ranks("tests.verl_patches.utils.checkpoint_dropout_program", 1, tmp_path, 120, imported=MEGATRON)
    found = json.loads((tmp_path / "rank0.json").read_text())
    first, second = found["saved"]
    assert {"everywhere", "model-parallel-rng", "expert-parallel-rng"} <= first.keys()
    for name, elements in first.items():
        assert 0 < len(elements) < 300 and elements != second[name]
    assert found["loaded"] == found["saved"]
