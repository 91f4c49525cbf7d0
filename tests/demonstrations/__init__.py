"""One effect test for every patch: how a minimal call behaves differently with the patch than without it.

An effect test takes the patch's body and returns a plain value. The test suite calls it with the real body and with one
that does nothing (INERT), with every feature switched on. The two results must differ, so no effect test can pass
without showing an effect. Its result with the patch is kept in `effects.json`, so that a change of a patch's effect is
noticed too; `python -m overlay update` writes that file again.
If the body would need a whole model, stand-ins replace its own parts, and the effect test shows that they are called
instead of upstream; their own tests show what they do.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from overlay import Feature
from overlay.declaration import declared
from overlay.install import wrapped
from verl_patches.features.alerts.feature import AlertsSettings
from verl_patches.features.mindspeed.feature import MindspeedSettings
from verl_patches.features.rollout_parallel.feature import RolloutSettings
from verl_patches.features.router_balance.feature import RouterBalanceSettings
from verl_patches.features.settings import OverlaySettings

EFFECTS = Path(__file__).with_name("effects.json")

Demonstration = Callable[[Callable[..., Any]], Any]
_found: dict[str, Demonstration] = {}


def demonstrates(target: str, feature: Feature) -> Callable[[Demonstration], Demonstration]:
    """Register the decorated function as the effect test of a feature's patch of a target."""

    def record(demonstration: Demonstration) -> Demonstration:
        label = f"{target}@{feature.name}"
        assert label not in _found, f"{label} has two demonstrations"
        _found[label] = demonstration
        return demonstration

    return record


def demonstrations() -> dict[str, Demonstration]:
    """Return all effect tests, by the label of the patch."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return dict(_found)


# For each kind of patch, a body that does nothing.
INERT: dict[str, Callable[..., Any]] = {
    "wrap": lambda upstream, *args, **kwargs: upstream(*args, **kwargs),
    "replace": lambda *args, **kwargs: "upstream",
    "add": lambda module: None,
    "register": lambda module: {},
    "before_import": lambda: None,
    "provide": ModuleType,
}


def all_switched_on() -> OverlaySettings:
    """Return settings in which every feature is on."""
    return OverlaySettings(
        alerts=AlertsSettings(enabled=True),
        rollout=RolloutSettings(expert_parallel_size=4),
        mindspeed=MindspeedSettings(engine="on"),
        router_balance=RouterBalanceSettings(forced=True),
        precision="float32",
        recompute_old_log_prob=False,
        rollout_temperature=0.5,
        dynamic_update=True,
        load_from_hf="folder",
        rollout_seed=3,
        kv_cache_blocks=256,
        filter_groups=True,
        overlong_penalty=True,
        overlong_filtering=True,
    )


def effects() -> dict[str, str]:
    """Return the recorded result of each effect test with its patch, as text, by the patch's label."""
    return json.loads(EFFECTS.read_text(encoding="utf-8"))


def observed(demonstration: Demonstration, body: Callable[..., Any]) -> Any:
    """Return the effect test's result, or the type of the error that it raises."""
    try:
        return demonstration(body)
    except Exception as error:
        return f"raises {type(error).__name__}"


def installed(body: Callable[..., Any], upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that the engine installs in place of `upstream` for the wrap with this body."""
    (patch,) = [each for each in declared() if each.body is body]
    return wrapped(upstream, body, is_on=patch.feature.is_active)


class Upstream:
    """Stands for upstream's function: records its calls and returns "upstream"."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "upstream"

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of the last call."""
        return self.calls[-1][1]
