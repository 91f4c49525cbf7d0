"""The collectives that a step counts are the same in a process's first step as in later ones. The first forward after
an agreement is the one that vLLM-Ascend would run."""

import ast
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import pytest
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

from verl_patches.features.dp_sync import decode_loop
from verl_patches.features.dp_sync.agreement import forward_of_rank, largest
from verl_patches.features.dp_sync.sync_window import LocalState, Progress, decide, encode
from verl_patches.features.measure import step_record
from verl_patches.workers.sharding_manager import megatron_vllm

GROUP = SimpleNamespace(world_size=1, rank_in_group=0, device_group=None)


@pytest.fixture(autouse=True)
def record(monkeypatch, own_context):
    """Return the step record of a single rank, whose collectives change nothing."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    return step_record.current_record()


def test_the_start_of_an_engine_counts_in_no_step(record):
    """vLLM-Ascend's warm-up agrees too, on every start and therefore in the step after every resume."""
    agreed = decode_loop.agree_once(LocalState(4, 3, False, False), GROUP)
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
        bytes_received=16,
        expert_bytes_received=4,
        values_changed_by_casts=1,
    )
    monkeypatch.setattr(megatron_vllm, "_resharder", lambda _: SimpleNamespace(run=lambda: report))
    megatron_vllm._run_plan(None)
    assert record.counts == {
        "collectives/all_to_all/count": 2,
        "collectives/all_to_all/bytes": 8,
        "reshard/bytes_received": 16,
        "reshard/expert_bytes_received": 4,
        "reshard/values_changed_by_casts": 1,
    }


def agreed_by(offers):
    vectors = [encode(offer, Progress(), rank, len(offers)) for rank, offer in enumerate(offers)]
    return decide([max(column) for column in zip(*vectors, strict=True)], len(offers), limit=4)


@pytest.fixture(scope="module")
def upstreams_forward():
    """Return vLLM-Ascend's `_get_forward_metadata_across_dp`, compiled from source: importing its module takes 20 s."""
    source = Path(find_spec("vllm_ascend").submodule_search_locations[0], "worker", "model_runner_v1.py").read_text()
    (method,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "_get_forward_metadata_across_dp"
    )
    code = compile(ast.Module([method], []), "model_runner_v1.py", "exec")

    def forward(offers, rank, graphs):
        def all_reduce(metadata, group):
            for other, each in enumerate(offers):
                flags = torch.tensor([each.with_prefill, not each.two_batches])
                if other != rank:
                    metadata[other], metadata[len(offers) + other] = each.padded_tokens, each.tokens
                    metadata[-2:] += flags

        names = {
            "Optional": Optional, "torch": torch, "dist": SimpleNamespace(all_reduce=all_reduce),
            "get_dp_group": lambda: SimpleNamespace(cpu_group=None),
        }  # fmt: skip
        exec(code, names)
        runner = SimpleNamespace(
            dp_size=len(offers), dp_rank=rank, is_kv_producer=False, is_kv_consumer=False, torchair_graph_enabled=graphs
        )
        mine = offers[rank]
        return names[method.name](runner, mine.padded_tokens, mine.tokens, mine.with_prefill, mine.two_batches)

    return forward


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("prefills", [(False, False, False), (False, True, False)])
@pytest.mark.parametrize("two_batches", [(True, True, True), (True, False, True)])
def test_first_forward_is_upstreams(graphs, prefills, two_batches, upstreams_forward):
    sizes = zip((4, 1, 8), (3, 1, 7), prefills, two_batches, strict=True)
    offers = [LocalState(*each) for each in sizes]
    for rank, mine in enumerate(offers):
        tokens, across, *flags = forward_of_rank(mine, agreed_by(offers), rank, fixed_sizes=graphs)
        expected = upstreams_forward(offers, rank, graphs)
        assert (tokens, across.tolist(), flags) == (expected[0], expected[1].tolist(), list(expected[2:]))


def test_later_forward_fits_vllms_metadata_on_every_rank():
    """Each rank may run fewer tokens than announced; all of them still exchange by the same maximum size."""
    from vllm.forward_context import DPMetadata

    announced = [LocalState(count, count, False, False) for count in (4, 2, 3)]
    agreed = agreed_by(announced)
    for now in product((4, 3, 1), (2, 1), (3, 2, 1)):
        for rank, count in enumerate(now):
            tokens, across, *_ = forward_of_rank(
                LocalState(count, count, False, False), agreed, rank, fixed_sizes=False
            )
            parallel = SimpleNamespace(data_parallel_size=3, data_parallel_rank=rank)
            made = DPMetadata.make(parallel, None, tokens, across)  # asserts that the rank's entry is its own
            assert (tokens, int(across[rank])) == (count, count)
            assert int(made.max_tokens_across_dp_cpu) == 4 and across.dtype == torch.int32
