"""Places of the rollout engines, and the ports over which they find each other."""

import os
import socket

import pytest
import torch.distributed as dist

from verl_patches.features.rollout_parallel.engine_environment import (
    EnginePlace,
    check_expert_parallel,
    free_ports,
    set_engine_environment,
)


@pytest.fixture
def rank_0_chooses(monkeypatch):
    """Stands in for the broadcast: every rank receives the ports, and only rank 0 may bring some."""

    def broadcast_object_list(objects, src):
        assert src == 0
        chosen = objects[0]
        brought.append(chosen)
        objects[0] = [7001, 7002]

    brought = []
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast_object_list)
    return brought


def test_ranks_of_one_tensor_parallel_index_share_a_port(monkeypatch, rank_0_chooses):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name in ("SIZE", "RANK", "RANK_LOCAL", "MASTER_IP", "MASTER_PORT"):
        monkeypatch.setenv(f"VLLM_DP_{name}", "")
    seen = []
    for rank in range(4):
        set_engine_environment(EnginePlace(rank, world=4, tensor_parallel=2))
        seen.append([os.environ[f"VLLM_DP_{name}"] for name in ("SIZE", "RANK", "MASTER_PORT")])
    assert seen == [["2", "0", "7001"], ["2", "0", "7002"], ["2", "1", "7001"], ["2", "1", "7002"]]
    assert len(rank_0_chooses[0]) == 2 and rank_0_chooses[1:] == [None, None, None]


def test_free_ports_differ_and_can_be_listened_on():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("world", "tensor_parallel", "expert_parallel", "sentence"),
    [(4, 2, 2, "must be the number of ranks 4"), (4, 3, 4, "do not divide")],
)
def test_other_arrangements_are_refused(world, tensor_parallel, expert_parallel, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_expert_parallel(EnginePlace(0, world, tensor_parallel), expert_parallel)


def test_all_ranks_is_accepted():
    check_expert_parallel(EnginePlace(0, 4, 2), 4)
