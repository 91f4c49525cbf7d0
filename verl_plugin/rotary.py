"""The types of rotary embeddings that bridges of Megatron-core build; checks of a job and the bridges share them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ROTARY_TYPES = {"deepseek_v3": ("default", "yarn")}


def rotary_type(model: Mapping[str, Any]) -> str:
    """Return the type of rotary embeddings in the values of a config.json of any release of transformers."""
    scaling = model.get("rope_parameters") or model.get("rope_scaling") or {}
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def is_built(model_type: str, rotary: str) -> bool:
    """Whether mbridge 0.15.1, with this project's bridges, builds this type for a model."""
    return rotary in _ROTARY_TYPES.get(model_type, ("default",))
