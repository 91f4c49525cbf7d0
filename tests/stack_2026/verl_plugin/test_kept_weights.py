"""Several optimizer steps between two weight updates: old log-probs stay those of the rollout, and no step is lost."""

from typing import Any

import pytest

from tests.stack_2026.engine_ranks import run_engines
from tests.stack_2026.verl_plugin.kept_weights_program import ENGINES, KEPT, NEWEST, OFFLOADED, PLAIN, STEPS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """Results of each of two ranks, by engine and way."""
    models = (case.model for case in ENGINES.values())
    return run_engines("tests.stack_2026.verl_plugin.kept_weights_program", models, tmp_path_factory.mktemp("kept"))


@pytest.mark.parametrize("engine", ENGINES)
def test_no_optimizer_step_is_lost(ranks, engine):
    for rank in ranks:
        assert rank[engine][KEPT]["weights"] == rank[engine][PLAIN]["weights"]


@pytest.mark.parametrize("engine", ENGINES)
def test_old_log_probs_are_those_of_the_rollouts_weights(ranks, engine):
    for rank in ranks:
        old, newest = (rank[engine][way]["old"] for way in (KEPT, NEWEST))
        assert len(old) == STEPS and len(set(old)) == 1
        assert len(set(newest)) == STEPS and newest[0] == old[0]


def test_weights_that_leave_the_die_are_kept_by_megatron_alone(ranks):
    """`--check` rejects them with FSDP2: verl's copies on the host share memory with the weights."""
    for rank in ranks:
        megatron, fsdp2 = rank["megatron"], rank["fsdp2"]
        assert megatron[OFFLOADED] == megatron[KEPT]
        assert fsdp2[OFFLOADED]["weights"] != fsdp2[KEPT]["weights"]
