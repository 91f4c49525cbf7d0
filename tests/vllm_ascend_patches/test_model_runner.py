"""The model runner: graphs that are rejected for a model whose weights leave the device, and the batch that a rank
runs in an agreement."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from overlay import ConfigurationError
from tests.demonstrations import Upstream, installed
from verl_patches.features import settings
from verl_patches.features.dp_sync import decode_loop
from verl_patches.features.dp_sync.sync_window import ReducedState
from verl_patches.features.residency.feature import ResidencySettings
from vllm_ascend_patches.worker.model_runner_v1 import get_forward_metadata_across_dp, load_model


@pytest.mark.parametrize(
    ("residency", "captures", "refused"),
    [
        (ResidencySettings(), True, True),
        (ResidencySettings(), False, False),
        (ResidencySettings(rollout_addresses="reserved"), True, False),
        (ResidencySettings(enabled=False), True, False),
    ],
)
def test_acl_graphs_need_addresses_that_stay(residency, captures, refused):
    runner, upstream = SimpleNamespace(use_aclgraph=captures), Upstream()
    chosen = replace(settings.current(), residency=residency)
    with (
        mock.patch.object(settings, "_current", chosen),
        mock.patch("verl_patches.features.residency.reserved.reserve_weights"),
        pytest.raises(ConfigurationError, match="Set it to reserved") if refused else nullcontext(),
    ):
        installed(load_model, upstream)(runner)
    assert len(upstream.calls) == (not refused)


@pytest.mark.parametrize(
    ("graphs", "in_rollout", "runs"),
    [
        # A graph has the same size on all ranks, the largest; without graphs each rank runs its own batch.
        (True, True, (8, [8, 8])),
        (True, False, (8, [8, 8])),
        (False, True, (2, [8, 2])),
        (False, False, (2, [8, 2])),
    ],
)
def test_rank_runs_the_agreed_size_of_graphs_alone(graphs, in_rollout, runs, monkeypatch):
    from vllm.distributed import parallel_state

    asked = []

    def forward(mine, stand_in, graph_sizes):
        asked.append((mine.padded_tokens, mine.tokens, graph_sizes))
        return ReducedState((8, 2), (7, 2), False, True, 1, 0)

    loop = SimpleNamespace(forward=forward)
    monkeypatch.setattr(decode_loop, "going", lambda: loop if in_rollout else None)
    monkeypatch.setattr(decode_loop, "agree_once", lambda mine, group: forward(mine, None, (2, 8) if graphs else ()))
    monkeypatch.setattr(parallel_state, "get_dp_group", lambda: None)
    runner = SimpleNamespace(
        dp_size=2, dp_rank=1, is_kv_producer=False, is_kv_consumer=False, torchair_graph_enabled=graphs,
        torchair_graph_batch_sizes=(2, 8), _dummy_run=pytest.fail,
    )  # fmt: skip
    tokens, across, with_prefill, two_batches = get_forward_metadata_across_dp(Upstream(), runner, 2, 2, False, True)
    assert ((tokens, across.tolist()), with_prefill, two_batches) == (runs, False, True)
    assert asked == [(2, 2, (2, 8) if graphs else ())]


@pytest.mark.parametrize("producer, consumer", [(True, False), (False, True), (True, True)])
def test_engine_that_hands_caches_on_decides_by_itself(producer, consumer, monkeypatch):
    monkeypatch.setattr(decode_loop, "going", lambda: pytest.fail("it asks the other engines"))
    runner, upstream = SimpleNamespace(dp_size=2, is_kv_producer=producer, is_kv_consumer=consumer), Upstream()
    get_forward_metadata_across_dp(upstream, runner, 2, 2, False, True)
    assert len(upstream.calls) == 1
