"""Check in a running process that calls reach the patches, through the target's path and through every copy."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from overlay.aliases import copies, modules_of
from overlay.engine import Effect, Engine
from overlay.errors import EffectiveError, TargetError
from overlay.targets import find


@dataclass(frozen=True)
class OverlayReport:
    """The state of the overlay in a process. The lists hold targets.

    Attributes:
        effective: whether calls reach the patch, for each applied one.
        absent: pending because their upstream is not installed.
        unneeded: stand-ins for a module that exists.
        rebound: the places that held a copy taken before the patch.
        drift: accepted differences from the supported releases.
        problems: everything that is wrong, in sentences.
    """

    applied: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    effective: dict[str, bool] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    unneeded: list[str] = field(default_factory=list)
    rebound: list[str] = field(default_factory=list)
    drift: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        return asdict(self)


def examine(engine: Engine) -> OverlayReport:
    """Check every applied patch through its target and through all copies of the replaced object."""
    names = [patch.name for patch in engine.plan.patches]
    pending = [index for index in sorted(engine.pending) if names[index] not in engine.absent]
    faults = {name: _faults(effect) for name, effect in engine.effects.items()}
    for name, sites in _stale_copies(engine).items():
        faults[name].append(f"copies of upstream's version are still in {', '.join(sites)}")
    applied = _unique(names[index] for index in engine.applied)
    problems = [f"{name}: {fault}" for name, found in faults.items() for fault in found]
    problems += [_overdue(engine, index) for index in pending if engine.is_executed(engine.plan.patches[index].module)]
    return OverlayReport(
        applied=applied,
        pending=_unique(names[index] for index in sorted(engine.pending)),
        effective={name: not faults.get(name) for name in applied},
        absent=_unique(engine.absent),
        unneeded=list(engine.unneeded),
        rebound=list(engine.rebound),
        drift=list(engine.drift),
        problems=problems + engine.failures,
    )


def require(report: OverlayReport, required: Iterable[str] = ()) -> OverlayReport:
    """Return the report if all is well.

    Args:
        report: the result of `examine`.
        required: targets that must be applied by now.

    Raises:
        EffectiveError: with everything that is wrong.
    """
    missing = [f"{name}: required here, but not applied" for name in required if name not in report.applied]
    if report.problems or missing:
        raise EffectiveError("patches are not in use:\n  " + "\n  ".join(report.problems + missing))
    return report


def _faults(effect: Effect) -> list[str]:
    module = sys.modules.get(effect.module)
    if module is None:
        return ["its module was unloaded"]
    if not effect.qualified_name:
        return [] if module is effect.current else ["another module replaced the provided one"]
    try:
        place = find(module, effect.qualified_name)
    except TargetError as error:
        return [str(error)]
    if effect.entries:
        mapping = getattr(place.holder, place.name, {})
        lost = [key for key, value in effect.entries.items() if key not in mapping or mapping[key] is not value]
        return [f"the entries {', '.join(map(repr, lost))} are gone or overwritten"] if lost else []
    return [] if place.raw is effect.current else [f"overwritten since by {_origin(place.raw)}"]


def _stale_copies(engine: Engine) -> dict[str, list[str]]:
    replacements = [each for effect in engine.effects.values() for each in effect.replacements]
    target_of = {id(each.old): name for name, effect in engine.effects.items() for each in effect.replacements}
    sites: dict[str, list[str]] = {}
    for copy in copies(replacements, modules_of(engine.packages), engine.packages):
        sites.setdefault(target_of[id(copy.replacement.old)], []).append(copy.site)
    return sites


def _overdue(engine: Engine, index: int) -> str:
    patch, waits = engine.plan.patches[index], engine.waits_for(index)
    reason = f"waits for {', '.join(waits)}" if waits else "was not applied"
    return f"{patch.describe()}: {patch.module} is imported and this patch {reason}"


def _origin(raw: Any) -> str:
    return f"{getattr(raw, '__module__', type(raw).__module__)}.{getattr(raw, '__qualname__', type(raw).__name__)}"


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
