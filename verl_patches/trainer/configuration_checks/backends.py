"""The back-end that a configuration trains with. Its keys tell: verl has one configuration file per back-end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from verl_patches.trainer.configuration_checks.fsdp_schema import FsdpConfiguration
from verl_patches.trainer.configuration_checks.schema import Configuration

Backend = Literal["megatron", "fsdp"]
SCHEMAS: Mapping[Backend, type[BaseModel]] = {"megatron": Configuration, "fsdp": FsdpConfiguration}
NAMES: Mapping[Backend, str] = {"megatron": "Megatron", "fsdp": "FSDP"}


def backend_of(config: Mapping[str, Any]) -> Backend:
    """Return the back-end of a composed configuration; its strategy decides if it has the keys of both or neither."""
    node: Any = config
    for name in ("actor_rollout_ref", "actor"):
        node = node.get(name) if isinstance(node, Mapping) else None
    actor = node if isinstance(node, Mapping) else {}
    if ("fsdp_config" in actor) != ("megatron" in actor):
        return "fsdp" if "fsdp_config" in actor else "megatron"
    return "fsdp" if actor.get("strategy") in ("fsdp", "fsdp2") else "megatron"
