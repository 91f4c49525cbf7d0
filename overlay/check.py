"""Check all patches against some upstream's source, and generate the lock from it. Source is parsed, never imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from overlay.declaration import Patch
from overlay.definitions import all_definitions, imported_module, module_level_imports
from overlay.drift import CLEAN, ModuleSource, Status, TargetStatus, compare, depends_on
from overlay.errors import OverlayError
from overlay.fingerprint import fingerprint
from overlay.lock import Lock, Locked
from overlay.pins import Pins, Upstream
from overlay.sources import Sources

CLEAN_EXIT, DRIFT_EXIT, UNVERIFIED_EXIT = 0, 1, 2
_IMPORT = re.compile(rb"^[ \t]*from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """The result of the check for one target of one patch.

    `copied_in` are the modules that copy the target when they are imported; the engine rebinds their copies.
    """

    patch: str
    target: str
    relied_on: bool
    status: Status
    detail: str = ""
    copied_in: list[str] = field(default_factory=list)


def check(patches: Iterable[Patch], lock: Lock, pins: Pins, upstream: Upstream, sources: Sources) -> list[Verdict]:
    """Compare everything the patches change or rely on in one upstream with its source."""
    reader = Reader(sources)
    verdicts = []
    for patch in patches:
        for target in dict.fromkeys((patch.target, *patch.relies_on)):
            if pins.of_module(target.partition(":")[0]) != upstream:
                continue
            finding = find(patch, target, lock, reader)
            verdicts.append(Verdict(patch.label, target, target != patch.target, finding.status, finding.detail))
    copied = _copies(reader, {verdict.target for verdict in verdicts if not verdict.relied_on})
    return [replace(each, copied_in=[] if each.relied_on else copied.get(each.target, [])) for each in verdicts]


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """Return 0 if all is clean, 1 if something differs, 2 if something could not be verified."""
    statuses = {verdict.status for verdict in verdicts} - set(CLEAN)
    if statuses - {"UNVERIFIED"}:
        return DRIFT_EXIT
    return UNVERIFIED_EXIT if statuses else CLEAN_EXIT


def generate(
    patches: Sequence[Patch], pins: Pins, releases: Sequence[tuple[Upstream, str, Sources]], old: Lock
) -> tuple[Lock, list[str]]:
    """Generate the lock of everything that the patches depend on; also returns what is missing from it, in sentences.

    Args:
        patches: all patches.
        pins: tells which upstream a target belongs to.
        releases: the sources at hand, each with its upstream and the release's name.
        old: the lock from which entries of releases that are not at hand are kept.
    """
    wanted = sorted({target for patch in patches for target in depends_on(patch)})
    lock, problems = Lock(), []
    readers = {(upstream.name, label): Reader(sources) for upstream, label, sources in releases}
    for target in wanted:
        module, colon, _ = target.partition(":")
        upstream = pins.of_module(module)
        if upstream is None or not colon:
            problems.append(f"{target}: not a target in an upstream of pins.toml")
            continue
        at_hand = {label: reader for (name, label), reader in readers.items() if name == upstream.name}
        for label, known in old.targets.get(target, {}).items():
            if label not in at_hand and label in (upstream.cluster_label, upstream.release):
                lock.targets.setdefault(target, {})[label] = known
                _keep_module(lock, old, module, label)
        for label, reader in at_hand.items():
            _lock_target(lock, target, label, reader)
        for label in filter(None, (upstream.cluster_label, upstream.release)):
            if label not in lock.targets.get(target, {}):
                problems.append(f"no source of {upstream.name} {label} was given")
    return lock, list(dict.fromkeys(problems))


def _lock_target(lock: Lock, target: str, label: str, reader: Reader) -> None:
    module, _, qualified_name = target.partition(":")
    source = reader.module(module)
    definition = source.definition(qualified_name) if source else None
    locked = Locked(fingerprint(list(definition.nodes)), definition.implied) if definition else Locked(None)
    lock.targets.setdefault(target, {})[label] = locked
    if source is not None:
        lock.modules.setdefault(module, {})[label] = source.sha256


def _keep_module(lock: Lock, old: Lock, module: str, label: str) -> None:
    if label in old.modules.get(module, {}):
        lock.modules.setdefault(module, {})[label] = old.modules[module][label]


class Reader:
    """Reads sources and parses each module once."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._read: dict[str, ModuleSource] = {}

    def module(self, name: str) -> ModuleSource | None:
        """Return a module, or None if there is no such module."""
        content = self.sources.text(name)
        if content is None:
            return None
        return self._read.setdefault(name, ModuleSource(name, content))


def find(patch: Patch, target: str, lock: Lock, reader: Reader, elsewhere: bool = True) -> TargetStatus:
    """Compare one target, which the patch changes or relies on, with its source.

    With ``elsewhere``, which takes a while, a missing target is looked for under other names and in other modules.
    """
    relied_on = target != patch.target
    module, _, qualified_name = target.partition(":")
    if not qualified_name:
        return TargetStatus("OK") if reader.sources.has(module) else TargetStatus("MISSING", f"no module {module}")
    source = reader.module(module)
    moved = _moved(target, lock, reader) if elsewhere and source is None else None
    if source is None:
        return moved or TargetStatus("MISSING", f"no module {module}")
    try:
        if patch.kind == "add" and not relied_on:
            exists = source.definition(qualified_name)
            taken = exists is not None and not exists.implied
            return (
                TargetStatus("CONFLICT", "upstream defines what the patch would add") if taken else TargetStatus("OK")
            )
        finding = compare(lock, target, source)
        moved = _moved(target, lock, reader) if elsewhere and finding.status == "MISSING" else None
        return moved or finding
    except SyntaxError as error:
        return TargetStatus("UNVERIFIED", f"{module} cannot be parsed: {error.msg} in line {error.lineno}")


def _moved(target: str, lock: Lock, reader: Reader) -> TargetStatus | None:
    """Find where a target's code has moved: to another name in its module, or to another module under its own name."""
    module, _, qualified_name = target.partition(":")
    known = {entry.fingerprint.behaviour for entry in lock.targets.get(target, {}).values() if entry.fingerprint}
    defining = re.compile(rb"^\s*(?:async def|def|class)\s+" + qualified_name.partition(".")[0].encode() + rb"\b", re.M)
    for name, (content, _) in sorted(reader.sources.modules.items(), key=lambda item: item[0] != module):
        if name != module and not defining.search(content):
            continue
        source = reader.module(name)
        try:
            definitions = list(all_definitions(source.tree)) if source else []
        except SyntaxError:
            continue
        for found, nodes in definitions:
            if (name == module or found == qualified_name) and fingerprint(list(nodes)).behaviour in known:
                return TargetStatus("MOVED", f"now {name}:{found}")
    return None


def _copies(reader: Reader, targets: set[str]) -> dict[str, list[str]]:
    """Return for each target the modules that import it by name when they are imported themselves."""
    wanted = {target for target in targets if ":" in target and "." not in target.partition(":")[2]}
    names = {target.partition(":")[2].encode() for target in wanted}
    copied: dict[str, list[str]] = {}
    for module, (content, is_package) in sorted(reader.sources.modules.items()):
        if not _may_import(content, names):
            continue
        source = reader.module(module)
        try:
            imports = list(module_level_imports(source.tree)) if source else []
        except SyntaxError:
            continue
        for target in _imported_targets(imports, module, is_package):
            if target in wanted:
                copied.setdefault(target, []).append(module)
    return {target: sorted(set(modules)) for target, modules in copied.items()}


def _may_import(content: bytes, names: set[bytes]) -> bool:
    return any(names.intersection(re.findall(rb"\w+", match.group(2))) for match in _IMPORT.finditer(content))


def _imported_targets(imports: Iterable[ast.ImportFrom], module: str, is_package: bool) -> Iterator[str]:
    for node in imports:
        origin = imported_module(node, module, is_package)
        for alias in node.names:
            yield f"{origin}:{alias.name}"


class UnknownUpstreamError(OverlayError):
    """A name on the command line is none of the upstreams of pins.toml."""


def upstream_named(pins: Pins, name: str) -> Upstream:
    """Return the upstream with this name, package or distribution.

    Raises:
        UnknownUpstreamError: no upstream has it.
    """
    for upstream in pins.upstreams:
        if name and name in (upstream.name, upstream.distribution, *upstream.packages):
            return upstream
    known = ", ".join(upstream.name for upstream in pins.upstreams)
    raise UnknownUpstreamError(f"{name!r} is not an upstream; pins.toml has {known}")
