"""Extends verl's training engines: they hand weights over by alltoallv, through a socket of the job's own.

`actor_rollout_ref.model.external_lib` or VERL_USE_EXTERNAL_MODULES names this module. Megatron's engine is extended
where verl has one.
"""

from __future__ import annotations

from verl_plugin.alltoallv.addresses import register_adapter
from verl_plugin.alltoallv.fsdp2_engine import AlltoallvFSDP2
from verl_plugin.alltoallv.ipc_support import remember_ipc_support
from verl_plugin.engines import extend_engine, has_engine

remember_ipc_support()
register_adapter()
extend_engine("fsdp2", AlltoallvFSDP2)
if has_engine("megatron"):
    from verl_plugin.alltoallv.megatron_engine import AlltoallvMegatron

    extend_engine("megatron", AlltoallvMegatron)
