"""Adds the offload manager to verl's training engines on NPUs; see `verl_plugin.offload`.

    actor_rollout_ref.model.external_lib=[...,verl_plugin.offload.engines]

It comes after `verl_plugin.alltoallv.engines`, whose export does not call earlier modules, and after `phase_peaks`, so
that a phase is metered from the time when the state of the phase before has left.
"""

from __future__ import annotations

from verl_plugin.engines import extend_engine, has_engine
from verl_plugin.offload.fsdp2_engine import OffloadedFSDP2

extend_engine("fsdp2", OffloadedFSDP2)
if has_engine("megatron"):
    from verl_plugin.offload.megatron_engine import OffloadedMegatron

    extend_engine("megatron", OffloadedMegatron)
