"""The rehearsal on both engines with the same noise: what it samples is the same, and every difference is explained.

On `cann` every step is the published torch_npu's: rollout with vLLM-Ascend, reference and update with Megatron-core,
reshard and offload.
"""

import math
from types import SimpleNamespace

import pytest

from tests.npu_emulator.cann import side_by_side


def test_a_metric_that_differs_and_one_that_is_missing_are_found():
    metrics = {"critic/score/mean": 0.5, "actor/grad_norm": 1.0, "perf/mfu": 1.0}

    def unexplained(other: dict) -> list[str]:
        runs = [[SimpleNamespace(step=1, metrics=each)] for each in (metrics, other)]
        equal, rows = side_by_side.compare(*runs, side_by_side.FLOAT32)
        assert sorted([*equal, *(row.name for row in rows)]) == sorted(metrics.keys() | other.keys())
        assert all(name in "\n".join(side_by_side.table(equal, rows)) for name in metrics.keys() | other.keys())
        return [row.name for row in rows if row.why is None]

    assert unexplained(metrics | {"perf/mfu": 2.0, "actor/grad_norm": 1.0000001}) == []
    assert unexplained(metrics | {"critic/score/mean": 0.5000001}) == ["critic/score/mean"]
    assert unexplained(metrics | {"actor/grad_norm": 1.0001}) == ["actor/grad_norm"]
    assert unexplained(metrics | {"actor/grad_norm": math.nan}) == ["actor/grad_norm"]
    assert unexplained(metrics | {"actor/kl_loss": 0.5}) == ["actor/kl_loss"]


def test_a_metric_of_the_first_step_alone_is_compared_there():
    steps = [SimpleNamespace(step=1, metrics={"reshard/plan": 1.0}), SimpleNamespace(step=2, metrics={})]
    other = [SimpleNamespace(step=1, metrics={"reshard/plan": 2.0}), steps[1]]
    assert side_by_side.compare(steps, steps, ()) == (["reshard/plan"], [])
    assert [row.name for row in side_by_side.compare(steps, other, ())[1]] == ["reshard/plan"]


@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("precision", "steps"), [("float32", 5), ("bfloat16", 3)])
def test_both_engines_sample_the_same_and_every_difference_is_explained(precision, steps, tmp_path):
    runs = [side_by_side.rehearse(name, tmp_path / name, steps, precision) for name in side_by_side.ENGINES]
    equal, rows = side_by_side.compare(*runs, side_by_side.REASONS[precision])
    print("\n".join(side_by_side.table(equal, rows)))
    assert not [row for row in rows if row.why is None]
    assert all(record.metrics["reshard/weights_exact"] == 1 for run in runs for record in run)
    assert {name.split("/")[0] for name in equal} >= {"critic", "response_length", "prompt_length", "reshard"}
