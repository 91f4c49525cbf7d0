"""The planning benchmark: its layouts match torch's, and its plans match the output of `reshard_plan.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.reshard_planning import BUCKET, CASES, chunk, main
from post_training.plan.placement_text import parse_model
from post_training.reshard.statistics import plan_statistics


@pytest.mark.parametrize("rows", [1, 5, 128, 151936])
@pytest.mark.parametrize("parts", [1, 3, 256])
def test_rows_are_cut_as_torch_cuts_them(rows: int, parts: int) -> None:
    pieces = torch.arange(rows).chunk(parts)
    for at in range(parts):
        first, last = chunk(rows, parts, at)
        assert list(range(first, last)) == (pieces[at].tolist() if at < len(pieces) else [])


def test_a_rank_plans_what_all_ranks_together_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "deepseek-256", "--json", str(tmp_path / "results.json")]) == 0
    (found,) = json.loads((tmp_path / "results.json").read_text()).values()
    case = CASES["deepseek-256"]
    assert not isinstance(case.train, int)
    expected, plan = plan_statistics(parse_model(case.model), case.train, case.rollout, BUCKET)
    rank = case.trainers // 2
    own = sum(int(((leg.source == rank) | (leg.target == rank)).sum()) for leg in (plan.remote, plan.local))
    assert (found["buckets"], found["transfers"], found["ranks"]) == (expected.buckets, own, 256)
    assert found["seconds"] > 0 and found["memory"] > 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["deepseek-256", "256"]
