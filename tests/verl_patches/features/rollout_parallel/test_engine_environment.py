"""Places of the rollout engines, and the addresses by which they find each other."""

import os
import socket

import pytest
import torch.distributed as dist

from verl_patches.features.rollout_parallel.engine_environment import (
    EnginePlace,
    address_towards,
    check_expert_parallel,
    held_ports,
    set_engine_environment,
)

NAMES = ("SIZE", "RANK", "RANK_LOCAL", "MASTER_IP", "MASTER_PORT")
ADDRESS = {0: "10.0.0.1", 4: "10.0.0.2"}


@pytest.fixture
def brought(monkeypatch):
    """Replace the gather. Return what each rank brings; the leaders, ranks 0 and 4, offer an address and ports."""

    def all_gather_object(offers, mine):
        seen.append(mine)
        for leader, address in ADDRESS.items():
            if leader < len(offers):
                offers[leader] = (address, [7001 + leader, 7002 + leader])

    seen = []
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name in NAMES:
        monkeypatch.setenv(f"VLLM_DP_{name}", "")
    return seen


def exported(*places: EnginePlace) -> list[list[str]]:
    """Return the variables that each place exports."""
    variables = []
    for place in places:
        set_engine_environment(place)
        variables.append([os.environ[f"VLLM_DP_{name}"] for name in NAMES])
    return variables


def test_ranks_of_one_tensor_parallel_index_share_a_port(brought):
    assert exported(*(EnginePlace(rank, 4, 2, 4) for rank in range(4))) == [
        ["2", "0", "0", "10.0.0.1", "7001"],
        ["2", "0", "0", "10.0.0.1", "7002"],
        ["2", "1", "1", "10.0.0.1", "7001"],
        ["2", "1", "1", "10.0.0.1", "7002"],
    ]
    assert brought[0][0] == "127.0.0.1" and len(set(brought[0][1])) == 2
    assert brought[1:] == [None, None, None]


def test_two_instances_meet_on_machines_of_their_own(brought):
    seen = exported(*(EnginePlace(rank, 8, 2, 4) for rank in range(8)))
    assert [variables[:2] for variables in seen] == [["2", "0"], ["2", "0"], ["2", "1"], ["2", "1"]] * 2
    assert [variables[3] for variables in seen] == ["10.0.0.1"] * 4 + ["10.0.0.2"] * 4
    assert [variables[4] for variables in seen] == ["7001", "7002"] * 2 + ["7005", "7006"] * 2
    assert [rank for rank, offer in enumerate(brought) if offer] == [0, 4]


def test_held_ports_are_taken_while_they_are_held_and_free_afterwards():
    with held_ports(20) as ports:
        assert len(set(ports)) == 20
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("", ports[0]))
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_the_address_is_the_one_that_reaches_the_peer():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("localhost") in ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("world", "tensor_parallel", "expert_parallel", "sentence"),
    [(4, 2, 3, "instance of 3 ranks does not divide"), (8, 2, 6, "8 ranks do not divide into rollout instances")],
)
def test_other_arrangements_rejected(world, tensor_parallel, expert_parallel, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_expert_parallel(EnginePlace(0, world, tensor_parallel, expert_parallel))


@pytest.mark.parametrize(("world", "expert_parallel"), [(4, 4), (8, 4), (256, 128)])
def test_whole_instances_are_accepted(world, expert_parallel):
    check_expert_parallel(EnginePlace(0, world, 2, expert_parallel))
