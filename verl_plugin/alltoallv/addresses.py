"""Addresses of the sockets between a training rank and the vLLM worker on its die, which no other job shares.

verl names its socket after the Ray job, but a job ID only tells the jobs of one Ray apart: in every Ray that has just
started it is 01000000. Two of them on one machine would take each other's weights:
docs/upstream/verl-weight-sockets-of-two-rays.md.
"""

from __future__ import annotations

import os
from pathlib import Path

from verl.workers.rollout.base import _ROLLOUT_REGISTRY

_ADAPTER = "verl_plugin.alltoallv.adapter.OwnSocketAdapter"
_RAYLET = "RAY_RAYLET_PID"  # Ray sets it in its workers, from which vLLM's inherit it
_OF_VERL = "/rl-colocate-zmq-"


def _of_this_ray() -> str:
    """Return the process ID of this node's raylet and a hyphen; empty without Ray."""
    raylet = os.environ.get(_RAYLET)
    return f"{raylet}-" if raylet else ""


def control_path(job: str, training_rank: int) -> Path:
    """Return the socket of control messages of the worker on a training rank's die."""
    return Path(f"/tmp/rl-colocate-alltoallv-{_of_this_ray()}{job}-{training_rank}.sock")


def own_handle(handle: str) -> str:
    """Return the address of verl's hand-over, with this node's raylet in its name."""
    return handle.replace(_OF_VERL, _OF_VERL + _of_this_ray())


def register_adapter() -> None:
    """Have verl build this plugin's adapter for vLLM; the registry has no function for that."""
    _ROLLOUT_REGISTRY["vllm", "async"] = _ADAPTER
