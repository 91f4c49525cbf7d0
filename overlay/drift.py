"""Compare a target in some source with its entries in the lock."""

from __future__ import annotations

import ast
import hashlib
import logging
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from overlay.declaration import MODULE_KINDS, Patch
from overlay.definitions import Definition, find_definition
from overlay.errors import DriftError
from overlay.fingerprint import Fingerprint, fingerprint
from overlay.lock import Lock
from overlay.targets import source_file

Status = Literal["OK", "COSMETIC", "DRIFT", "SIGNATURE", "MOVED", "MISSING", "CONFLICT", "UNVERIFIED"]
CLEAN: tuple[Status, ...] = ("OK", "COSMETIC")

log = logging.getLogger("overlay")


@dataclass(frozen=True)
class TargetStatus:
    """The result of a comparison for one target: a status and a sentence."""

    status: Status
    detail: str = ""


@dataclass
class ModuleSource:
    """One module's source; it is parsed only if its SHA-256 is not a known one."""

    name: str
    content: bytes

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the source file."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree.

        Raises:
            SyntaxError: this interpreter cannot parse the module.
        """
        return ast.parse(self.content)

    def definition(self, qualified_name: str) -> Definition | None:
        """Return the definition of the name in this module; None if there is none."""
        return find_definition(self.tree, qualified_name)


def compare(lock: Lock, target: str, source: ModuleSource) -> TargetStatus:
    """Compare a target that must exist with all supported releases."""
    locked = lock.targets.get(target, {})
    known = {release: entry.fingerprint for release, entry in locked.items() if entry.fingerprint is not None}
    if source.sha256 in (lock.modules.get(source.name, {}).get(release) for release in known):
        return TargetStatus("OK")
    definition = source.definition(target.partition(":")[2])
    if definition is None:
        return TargetStatus("MISSING", f"{source.name} does not define it")
    if not known:
        return TargetStatus(
            "UNVERIFIED", "the lock has no fingerprint of it. Generate it with `python -m overlay lock`"
        )
    if definition.implied and not any(locked[release].implied for release in known):
        return TargetStatus("MISSING", "its class exists but does not define it")
    return _nearest(fingerprint(list(definition.nodes)), known)


def _nearest(found: Fingerprint, known: dict[str, Fingerprint]) -> TargetStatus:
    releases = " and ".join(sorted(known))
    if any(found.code == each.code for each in known.values()):
        return TargetStatus("OK")
    if any(found.behaviour == each.behaviour for each in known.values()):
        return TargetStatus("COSMETIC", f"only annotations differ from {releases}")
    if all(found.call != each.call for each in known.values()):
        expected = " or ".join(sorted({each.signature for each in known.values()}))
        return TargetStatus("SIGNATURE", f"{releases} have {expected}, but here it is {found.signature}")
    return TargetStatus("DRIFT", f"its body differs from the one in {releases}")


def depends_on(patch: Patch) -> tuple[str, ...]:
    """Return the targets that upstream must have unchanged: those relied on, and the patch's own unless it adds it."""
    own = () if patch.kind in ("add", *MODULE_KINDS) else (patch.target,)
    return own + patch.relies_on


class RunningSource:
    """Checks targets against the files that this process imports. Each file is read once."""

    def __init__(self, lock: Lock, accepted: tuple[str, ...]) -> None:
        self.lock = lock
        self.accepted = accepted
        self._files: dict[str, ModuleSource | None] = {}

    def verify(self, patch: Patch) -> list[str]:
        """Check a patch's target and everything it relies on; returns the differences that were accepted, in words.

        Drift that pins.toml accepts and targets that the lock does not know yet are only noted. So is a patch's own
        target that the source does not define, since applying the patch shows whether it exists.

        Raises:
            DriftError: naming the target, the supported releases, what changed and how to go on.
        """
        notes = []
        for target in depends_on(patch):
            finding = self._examine(target)
            if finding.status == "OK":
                continue
            only_noted = ("COSMETIC", "UNVERIFIED", *(["MISSING"] if target == patch.target else []))
            accepted = "*" in self.accepted or target in self.accepted
            if finding.status not in only_noted and not accepted:
                raise DriftError(f"{target} is {finding.status}: {finding.detail}. {_HOW_TO_GO_ON}")
            notes.append(f"{patch.describe()}: {target} is {finding.status}: {finding.detail}")
            log.warning("%s", notes[-1])
        return notes

    def _examine(self, target: str) -> TargetStatus:
        module = target.partition(":")[0]
        if module not in self._files:
            self._files[module] = _read(module)
        source = self._files[module]
        if source is None:
            return TargetStatus("MISSING", f"{module} has no source file")
        return compare(self.lock, target, source)


_HOW_TO_GO_ON = (
    "Install a supported release; or read `python -m overlay check`, update the patch and generate the lock again; "
    "or, to run anyway, name the target under accept_drift in pins.toml"
)


def _read(module: str) -> ModuleSource | None:
    imported = getattr(sys.modules.get(module), "__file__", None)
    try:
        file = Path(imported) if imported else source_file(module)
    except ModuleNotFoundError:
        return None
    return ModuleSource(module, file.read_bytes()) if file is not None and file.suffix == ".py" else None
