"""Collectives that a step counts: the same in the first step of a process as in any other."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
import torch_npu  # noqa: F401

from verl_patches.features.dp_sync import decode_loop
from verl_patches.features.dp_sync.agreement import largest
from verl_patches.features.dp_sync.lease import Offer
from verl_patches.features.measure import step_record
from verl_patches.workers.sharding_manager import megatron_vllm

GROUP = SimpleNamespace(world_size=1, rank_in_group=0, device_group=None)


@pytest.fixture(autouse=True)
def record(monkeypatch):
    """Of one rank, whose collectives change nothing."""
    monkeypatch.setattr(step_record, "_record", step_record.StepRecord())
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    return step_record.current_record()


def test_the_start_of_an_engine_counts_in_no_step(record):
    """vLLM-Ascend's warm-up agrees too, in every start and so in the step after every resume."""
    agreed = decode_loop.agree_once(Offer(4, 3, False, False), GROUP)
    assert agreed.tokens == (3,) and record.counts == {}


def test_an_agreement_of_a_rollout_counts(record):
    assert largest([2, 3], None) == [2, 3]
    assert record.counts == {"collectives/rollout_agreement/count": 1, "collectives/rollout_agreement/bytes": 8}


@pytest.mark.parametrize("planning", [0, 3])
def test_the_planning_of_the_first_reshard_counts_in_no_step(record, monkeypatch, planning):
    report = SimpleNamespace(
        collectives=2 + planning,
        object_collectives=planning,
        bytes_sent=8,
        bytes_received=8,
        expert_bytes_received=0,
        values_changed_by_casts=0,
    )
    monkeypatch.setattr(megatron_vllm, "_resharder", lambda _: SimpleNamespace(run=lambda: report))
    megatron_vllm._run_plan(None)
    assert record.counts["collectives/all_to_all/count"] == 2
