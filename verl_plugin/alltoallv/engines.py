"""Registers training engines that hand weights over by alltoallv, beside verl's own, which stay as they are.

`actor_rollout_ref.model.external_lib` or VERL_USE_EXTERNAL_MODULES names this module. Megatron's engine is registered
where verl has one.
"""

from __future__ import annotations

from verl.workers.engine import EngineRegistry

from verl_plugin.alltoallv.fsdp2_engine import AlltoallvFSDP2Engine

__all__ = ["AlltoallvFSDP2Engine"]


def _has_megatron() -> bool:
    try:
        EngineRegistry.get_engine_cls("language_model", "megatron")
    except (AssertionError, ValueError):
        return False
    return True


if _has_megatron():
    from verl_plugin.alltoallv.megatron_engine import AlltoallvMegatronEngine

    __all__ += ["AlltoallvMegatronEngine"]
