"""Each engine of a rollout has a seed that no other engine has, neither of this run nor of a run with another seed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_patches.workers.rollout.vllm_rollout.vllm_rollout_spmd import init


def started(seed, engines, rank):
    """Build verl's rollout on one engine of several. Return the seeds that it gets, the rollout and its config."""
    built, config = [], OmegaConf.create({"seed": seed, "n": 4})

    def upstream(rollout, model_path, config, *others, **options):
        built.append(config.seed)
        rollout.sampling_params = SimpleNamespace(seed=config.seed)

    rollout = SimpleNamespace()
    mesh = {} if engines is None else {"device_mesh": {"dp": SimpleNamespace(
        size=lambda: engines, get_local_rank=lambda: rank)}}  # fmt: skip
    init(upstream, rollout, "/model", config, None, None, **mesh)
    return built, rollout, config


@pytest.mark.parametrize("engines", [1, 2, 3, 128])
def test_no_two_engines_of_any_runs_share_a_seed(engines):
    seeds = [started(seed, engines, rank)[0][0] for seed in range(5) for rank in range(engines)]
    assert len({*seeds}) == 5 * engines and min(seeds) >= 0


def test_requests_are_not_seeded_and_the_configuration_stays():
    built, rollout, config = started(7, 4, 3)
    assert len(built) == 1 and rollout.sampling_params.seed is None
    assert rollout.config is config and config == {"seed": 7, "n": 4}


def test_an_engine_outside_of_a_worker_has_the_seed_itself():
    built, rollout, _ = started(7, None, 0)
    assert built == [7] and rollout.sampling_params.seed == 7
