"""The checkpoint engine in verl's registry, and its errors for an invalid configuration."""

import asyncio
import os
import subprocess
import sys

import pytest
import torch

from post_training.reshard.handover import HandoverError
from verl_plugin.alltoallv.checkpoint_engine import AlltoallvCheckpointEngine, Member, _worker_number

# Load the engine from the two keys, as verl's workers do.
REGISTRY = """
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs
print("alltoallv" in CheckpointEngineRegistry._registry)
import_external_libs("verl_plugin.alltoallv.checkpoint_engine")
print(CheckpointEngineRegistry.get("alltoallv").__name__)
"""


def test_module_registers_the_engine_with_verl():
    command = [sys.executable, "-W", "ignore", "-c", REGISTRY]
    run = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=300, check=True)
    assert run.stdout.split()[-2:] == ["False", "AlltoallvCheckpointEngine"]


def test_ranks_that_train_come_first_in_one_group():
    members = [Member("a", ("host", 7)), Member("b", None), Member("c", None)]
    actor, rollout = AlltoallvCheckpointEngine.build_topology(2, 1, members)
    assert (actor["rank"], rollout["rank"]) == ([0, 1], [2])
    assert actor["address"] == [("host", 7)] * 2 and rollout["trainers"] == [2] and rollout["world_size"] == [3]
    assert {*actor["name"], *rollout["name"]} == set(rollout["name"])
    _, replaced = AlltoallvCheckpointEngine.build_topology(2, 1, [*members[:2], Member("d", None)])
    assert replaced["name"] != rollout["name"]


@pytest.mark.parametrize(("group", "number"), [("", 5), ("aZx3Qp", 5), ("rollout_standalone_12", 49)])
def test_worker_found_by_the_number_of_its_replica(monkeypatch, group, number):
    """verl numbers replicas on training dies first, so a place among rollout ranks does not identify a worker."""
    for name, value in (("WG_PREFIX", group), ("WORLD_SIZE", "4"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    assert _worker_number(5) == number


def test_whole_tensors_rejected_with_the_key():
    engine = AlltoallvCheckpointEngine(1 << 20)
    whole = iter([("w", torch.zeros(2))])
    with pytest.raises(HandoverError, match="external_lib is invalid: .* Set it to verl_plugin.alltoallv.engines."):
        asyncio.run(engine.send_weights(whole, global_steps=1))


@pytest.mark.parametrize("value", [0, -1, True, "600"])
def test_timeout_that_is_none_rejected(value):
    with pytest.raises(ValueError, match=r"engine_kwargs.alltoallv.timeout_seconds=.* is invalid: .* Set it to "):
        AlltoallvCheckpointEngine(1 << 20, timeout_seconds=value)
