"""A configuration in which requests cannot migrate, or would migrate in vain, is rejected in one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from overlay import ConfigurationError
from verl_patches.features.rollout_rebalance.feature import ROLLOUT_REBALANCE

(check,) = ROLLOUT_REBALANCE.checks


def job(**graph: Any) -> dict[str, Any]:
    graphs = {"enabled": True, "graph_batch_sizes": [1, 4, 16]} | graph
    additional = {"torchair_graph_config": graphs}
    rollout = {"tensor_model_parallel_size": 2, "engine_kwargs": {"vllm": {"additional_config": additional}}}
    return {"actor_rollout_ref": {"rollout": rollout}}


def settings(enabled: bool = True, windows: bool = True, noise: bool = True, experts: int = 8) -> Any:
    return SimpleNamespace(
        rollout_rebalance=SimpleNamespace(enabled=enabled),
        request_noise=SimpleNamespace(enabled=noise),
        dp_sync=SimpleNamespace(enabled=windows),
        rollout=SimpleNamespace(expert_parallel_size=experts),
    )


@pytest.mark.parametrize(
    ("config", "chosen", "sentence"),
    [
        (job(), settings(noise=False), "needs actor_rollout_ref.overlay.request_noise.enabled=true.*. Set it, or"),
        (job(), settings(windows=False), "needs actor_rollout_ref.overlay.dp_sync.enabled=true"),
        (job(), settings(experts=2), "rollout.expert_parallel_size=2 with .*tensor_model_parallel_size=2 makes one"),
        (
            job(enabled=False),
            settings(),
            "needs graphs of several sizes.*enabled=False and graph_batch_sizes=.1, 4, 16",
        ),
        (job(graph_batch_sizes=[16]), settings(), "needs graphs of several sizes.*graph_batch_sizes=.16.*. Set it"),
        (
            {"actor_rollout_ref": {"rollout": {"tensor_model_parallel_size": 1}}},
            settings(),
            "enabled=False and graph_ba",
        ),
    ],
)
def test_invalid_rollout_rebalance_rejected(config, chosen, sentence):
    with pytest.raises(ConfigurationError, match=sentence) as rejected:
        check(config, chosen)
    assert "rollout_rebalance.enabled=true" in str(rejected.value) and "\n" not in str(rejected.value)
    check(config, settings(enabled=False))


def test_graphs_of_several_sizes_on_several_engines_pass():
    check(job(), settings())


def test_it_is_off_unless_it_is_asked_for():
    assert not ROLLOUT_REBALANCE.settings().enabled
