"""Extends verl's training engines and agent loops with routing replay.

`actor_rollout_ref.model.external_lib` names this module, beside others. Megatron's engine is extended where verl has
one.
"""

from __future__ import annotations

import verl_plugin.routing_replay.agent_loops  # noqa: F401  (registered there)
from verl_plugin.engines import extend_engine, has_engine
from verl_plugin.routing_replay.fsdp2_engine import RoutedFSDP2

extend_engine("fsdp2", RoutedFSDP2)
if has_engine("megatron"):
    from verl_plugin.routing_replay.megatron_engine import RoutedMegatron

    extend_engine("megatron", RoutedMegatron)
