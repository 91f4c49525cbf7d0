"""The modules that verl imports in every training process, where this project's engines are registered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from post_training.report.run_folder import at

LIBRARIES_KEY = "actor_rollout_ref.model.external_lib"


def libraries_of(config: Mapping[str, Any]) -> list[str]:
    """Return the names in `LIBRARIES_KEY`, in verl's order of import; verl takes a single name without a list too."""
    found = at(config, LIBRARIES_KEY) or []
    return [found] if isinstance(found, str) else list(found)
