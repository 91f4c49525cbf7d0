"""Memory that training takes on a die in each phase of a step, and bytes it copies, against verl's own offload."""

from typing import Any

import pytest

from tests.stack_2026.engine_ranks import run_engines
from tests.stack_2026.offload.program import CYCLES, ENGINES, FAULTS, GROUPS, OURS, STEPS, VERL

# The groups that each phase may have on the die. FSDP2's reference stays on the host in all phases.
ORDER = {
    "old_log_prob": {"actor"},
    "ref": {"reference"},
    "update": {"actor", "gradients", "optimizer"},
    "behind the update": {"actor"},
    "reshard": {"actor"},
    "rollout": set(),
}
NAMED = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each of two ranks."""
    models = (case.model for case in ENGINES.values())
    return run_engines("tests.stack_2026.offload.program", models, tmp_path_factory.mktemp("offload"))


def misplaced(found: dict[str, Any]) -> list[str]:
    """Return the groups that are on the die in a phase that does not need them."""
    return [
        f"{group} in {phase}"
        for phase, needed in ORDER.items()
        for group in GROUPS
        if found["held"][phase][group] and group not in needed
    ]


@NAMED
def test_each_phase_has_what_it_needs_alone(ranks, engine):
    for rank in ranks:
        found = rank[engine][OURS]
        assert misplaced(found) == []
        held, weights = found["held"], found["bytes"]
        assert all(held[phase]["actor"] >= weights["actor"] for phase in ORDER if "actor" in ORDER[phase])
        assert held["update"]["gradients"] >= weights["actor"] and held["update"]["optimizer"] > 0
        assert held["ref"]["reference"] >= (weights["reference"] if engine == "megatron" else 0)


@NAMED
def test_changed_order_detected(ranks, engine):
    """Controls: verl without its keys, and two planted faults."""
    for rank in ranks:
        stays = misplaced(rank[engine]["nothing leaves"])
        assert {"actor in rollout", "optimizer in rollout", "optimizer in reshard"} <= set(stays)
        assert "actor in ref" in misplaced(rank[engine]["others stay"])
        assert {"optimizer in reshard", "optimizer in rollout"} <= set(misplaced(rank[engine]["optimizer stays"]))


@NAMED
def test_parameters_are_copied_once_in_each_direction(ranks, engine):
    """Check the copies of one step.

    The actor is loaded before the old log-probs and again after the reference, and offloaded after the reshard. The
    reference is loaded once.
    """
    for rank in ranks:
        verl, ours = rank[engine][VERL], rank[engine][OURS]
        actor = ours["bytes"]["actor"]
        fewer = {way: verl["copied"][way] - ours["copied"][way] for way in verl["copied"]}
        # verl offloads after the old log-probs, the update and the reshard, and loads before each of them.
        reference = ours["bytes"]["reference"] if engine == "megatron" else 0
        assert fewer["device_to_host"] >= (2 if engine == "megatron" else 1) * actor * 0.99 + reference * 0.99
        assert fewer["host_to_device"] >= actor * 0.99


@NAMED
def test_update_is_verls_bit_for_bit(ranks, engine):
    for rank in ranks:
        verl, ours, planted = (rank[engine][who] for who in (VERL, OURS, "written is dropped"))
        assert len(verl["norms"]) == STEPS and verl["norms"] == ours["norms"]
        assert verl["weights"] == ours["weights"]
        # The control: parameters that the update wrote are dropped from the die without a copy.
        assert planted["weights"] != verl["weights"]


@NAMED
def test_fifty_cycles_leave_no_memory_behind(ranks, engine):
    for rank in ranks:
        found = rank[engine][OURS]
        assert found["cycles"] == found["cycles"][:1] * CYCLES and found["same"]
        assert len({tuple(row) for row in found["leaks"]}) == 3  # control: a leaked tensor shows up


def test_every_fault_was_planted(ranks):
    assert set(ranks[0]["megatron"]) == {VERL, OURS, *FAULTS}
