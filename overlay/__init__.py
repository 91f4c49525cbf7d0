"""The patch engine: declare patches of upstream packages, order them, apply them, prove that they are in use.

It knows no upstream by name; pins.toml lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.declaration import add, before_import, provide, register, replace, wrap
from overlay.errors import (
    ConfigurationError,
    ConflictError,
    DeclarationError,
    DriftError,
    EffectiveError,
    OverlayError,
    SettingsError,
    TargetError,
)
from overlay.feature import Feature, Key, read_settings_from

if TYPE_CHECKING:
    from overlay.effective import OverlayReport
    from overlay.engine import Engine
    from overlay.pins import Pins

__all__ = [
    "ConfigurationError",
    "ConflictError",
    "DeclarationError",
    "DriftError",
    "EffectiveError",
    "Feature",
    "Key",
    "OverlayError",
    "SettingsError",
    "TargetError",
    "activate",
    "add",
    "assert_effective",
    "before_import",
    "unpatched",
    "executed",
    "provide",
    "read_settings_from",
    "register",
    "replace",
    "report",
    "wrap",
]

_engine: Engine | None = None


def activate(pins: Pins | Path | None = None, lock_file: Path | None = None, stack: str = "") -> None:
    """Find all patch files and apply their patches, now or when their targets are imported. A second call does nothing.

    Args:
        pins: the upstreams or the file that names them; by default pins.toml beside this file.
        lock_file: the fingerprints of their supported releases; by default fingerprints.lock.json, or that of the
            stack, beside the file of the upstreams, or beside this file.
        stack: the stack of the file of upstreams whose patches these are; by default the file's default.

    Raises:
        ConflictError: the patches conflict; nothing has been changed.
        DriftError: upstream's source is none of the supported ones where a patch depends on it.
        PinsError: there is no such file of upstreams, or no such stack in it.
        StackError: the packages installed here are another stack's; nothing has been changed.
        TargetError: a target does not exist or does not fit.
    """
    global _engine
    if _engine is not None:
        return
    from overlay.discovery import load
    from overlay.engine import Engine
    from overlay.lock import LOCK_FILE
    from overlay.ordering import make_plan
    from overlay.pins import PINS_FILE, Pins

    if not isinstance(pins, Pins):
        file = pins or PINS_FILE
        pins = Pins.read(file, stack)
        lock_file = lock_file or file.with_name(pins.lock_name)
    pins.require_environment()
    engine = Engine(make_plan(load(pins.patch_packages())), pins, lock_file or LOCK_FILE)
    _engine = engine
    engine.activate()


@contextmanager
def unpatched() -> Iterator[None]:
    """Restore upstream inside the block, so that changes made there end up below the patches.

    For a library that changes upstream at a moment of its own, such as when its settings are known. Upstream's own
    functions are in place inside, so the library neither wraps ours nor overwrites them. Patches of modules that are
    imported inside are applied at the end. Not for a process in which other threads call upstream at the same time.

    Raises:
        TargetError: at the end, if a patch does not fit what has become of its target.
    """
    with nullcontext() if _engine is None else _engine.unpatched():
        yield


def report() -> OverlayReport:
    """Return what is applied, pending and effective in this process; all empty before `activate`."""
    from overlay.effective import OverlayReport, examine

    return OverlayReport() if _engine is None else examine(_engine)


def executed() -> list[str]:
    """Return the sorted labels of the patches whose bodies have been called in this process.

    Calls of replaced functions are not counted.
    """
    return [] if _engine is None else sorted(_engine.called)


def assert_effective(required: Iterable[str] = ()) -> OverlayReport:
    """Check that calls really reach every applied patch, and that none is overdue.

    Args:
        required: targets that must have been applied in this process by now.

    Raises:
        EffectiveError: with everything that is wrong, or because the overlay is not active.
    """
    from overlay.effective import require

    if _engine is None:
        raise EffectiveError("the overlay is not active in this process: call overlay.activate() first")
    return require(report(), required)
