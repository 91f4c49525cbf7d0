"""Extends verl's training engines: an update without old log-probs uses its own.

The trainer `sync_onpolicy` adds this module to `actor_rollout_ref.model.external_lib`.
"""

from __future__ import annotations

from verl_plugin.engines import extend_engine, has_engine
from verl_plugin.onpolicy.fsdp2_engine import OnPolicyFSDP2

extend_engine("fsdp2", OnPolicyFSDP2)
if has_engine("megatron"):
    from verl_plugin.onpolicy.megatron_engine import OnPolicyMegatron

    extend_engine("megatron", OnPolicyMegatron)
