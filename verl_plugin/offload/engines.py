"""Extends verl's training engines on NPUs: their state leaves and returns as `verl_plugin.offload` says.

    actor_rollout_ref.model.external_lib=[...,verl_plugin.offload.engines]

It comes behind `verl_plugin.alltoallv.engines`, whose export calls none before it, and behind `phase_peaks`, so that a
phase is metered from when the state of the one before has left.
"""

from __future__ import annotations

from verl_plugin.engines import extend_engine, has_engine
from verl_plugin.offload.fsdp2_engine import OffloadedFSDP2

extend_engine("fsdp2", OffloadedFSDP2)
if has_engine("megatron"):
    from verl_plugin.offload.megatron_engine import OffloadedMegatron

    extend_engine("megatron", OffloadedMegatron)
