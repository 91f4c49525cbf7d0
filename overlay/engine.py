"""Apply a plan of patches: at once where the target is imported already, otherwise when its import ends."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from overlay import provided
from overlay.aliases import Replacement, copies, modules_of
from overlay.declaration import MODULE_KINDS, Patch
from overlay.errors import TargetError
from overlay.hooks import HookFinder, import_under_way, when_import_ends
from overlay.install import replaced, wrapped
from overlay.ordering import PatchOrder
from overlay.pins import Pins
from overlay.targets import Place, defined_elsewhere, find, forget_folders, source_file

if TYPE_CHECKING:
    from overlay.drift import RunningSource

log = logging.getLogger("overlay")


@dataclass
class Effect:
    """The changes made to one target in this process. `upstream` is the place as it was before the first patch."""

    module: str
    qualified_name: str
    current: Any = None
    upstream: Place | None = None
    entries: dict[Any, Any] = field(default_factory=dict)
    replacements: list[Replacement] = field(default_factory=list)


class Engine:
    """One process's patches: those pending, those applied, and their effects."""

    def __init__(self, plan: PatchOrder, pins: Pins, lock_file: Path | None = None) -> None:
        self.plan = plan
        self.lock_file = lock_file
        self.drift: list[str] = []
        self.packages = pins.patched_packages()
        self.pins = pins
        self.pending = set(range(len(plan.patches)))
        self.applied: list[int] = []
        self.settled: set[int] = set()
        self.absent: list[str] = []
        self.unneeded: list[str] = []
        self.failures: list[str] = []
        self.rebound: list[str] = []
        self.called: set[str] = set()
        self.effects: dict[str, Effect] = {}
        self._is_unpatched = False
        self._of_module = plan.by_module()
        self._executed: set[str] = set()
        self._finder = HookFinder(self._hooked_modules(), self._before_import, self._after_import)

    def activate(self) -> None:
        """Check that every target module exists, install the hooks and patch what is imported already.

        Raises:
            TargetError: a target that does not exist or does not fit.
        """
        self._check_modules()
        self._provide()
        self._finder.install()
        imported = [sys.modules[name] for name in self._finder.modules if name in sys.modules]
        for module in filter(import_under_way, imported):
            when_import_ends(module, self._after_import)
        self._apply_ready(range(len(self.plan.patches)))

    @contextmanager
    def unpatched(self) -> Iterator[None]:
        """Take the patches out for the block and put them back on top of what changed inside.

        Imports in here run without patches of their modules, which are applied at the end too. A target that somebody
        has overwritten before is left alone, so that it is still reported.

        Raises:
            TargetError: a patch does not fit what has become of its target.
        """
        if self._is_unpatched:
            raise RuntimeError("the patches are already removed")
        taken_out = self._take_out()
        self._is_unpatched = True
        try:
            yield
        finally:
            self._is_unpatched = False
            self._put_back(taken_out)

    def _take_out(self) -> list[int]:
        """Restore upstream's own object in every place that holds one of ours; returns the patches concerned."""
        in_place = {name: effect for name, effect in self.effects.items() if _is_in_place(effect)}
        back = [each for effect in in_place.values() for each in _reversed(effect)]
        for effect in in_place.values():
            _restore(effect)
        for copy in copies(back, modules_of(self.packages), self.packages):
            copy.rebind()
        return [index for index in self.applied if self.plan.patches[index].name in in_place]

    def _put_back(self, taken_out: Iterable[int]) -> None:
        """Apply patches on top of the objects now in their places, and those of modules imported in the meantime."""
        self._forget(taken_out)
        self._apply_ready(sorted(self.pending), on_top=True)

    @functools.cached_property
    def _source(self) -> RunningSource:
        # Only a process that imports a target needs this; the prelude alone stays light.
        from overlay.drift import RunningSource
        from overlay.lock import Lock

        assert self.lock_file is not None, "asked only where there is a lock"
        return RunningSource(Lock.read(self.lock_file), self.pins.accept_drift)

    def waits_for(self, index: int) -> list[str]:
        """Return the labels of patches that must be applied before this one and are not applied yet."""
        missing = self.plan.predecessors[index] - self.settled
        return [self.plan.patches[before].label for before in sorted(missing)]

    def _hooked_modules(self) -> set[str]:
        return {patch.module for patch in self.plan.patches if patch.kind != "provide"}

    def _check_modules(self) -> None:
        forget_folders()
        for index, patch in enumerate(self.plan.patches):
            if patch.kind == "provide" or patch.module in sys.modules:
                if patch.kind == "before_import":
                    raise self._error(patch, f"{patch.module} is already imported. Activate the overlay earlier")
                continue
            try:
                if source_file(patch.module) is None:
                    raise self._error(patch, f"no module {patch.module}")
            except ModuleNotFoundError:
                self.absent.append(patch.name)
                self.settled.add(index)

    def _provide(self) -> None:
        for index, patch in enumerate(self.plan.patches):
            if patch.kind != "provide":
                continue
            self.pending.discard(index)
            self.settled.add(index)
            if provided.is_present(patch.target):
                self.unneeded.append(patch.name)
            else:
                module = provided.install(patch.target, functools.partial(self._build, patch))
                self.effects[patch.name] = Effect(patch.module, "", module)
                self.applied.append(index)

    def _build(self, patch: Patch, name: str) -> ModuleType:
        self.called.add(patch.label)
        return patch.body(name)

    def _before_import(self, name: str) -> None:
        self._executed.discard(name)
        for index in self._of_module.get(name, ()):
            patch = self.plan.patches[index]
            if patch.kind == "before_import" and index in self.pending:
                self.called.add(patch.label)
                self._guarded(patch, patch.body)
                self._settle(index)

    def _after_import(self, module: ModuleType) -> None:
        name = module.__name__
        self._executed.add(name)
        if self._is_unpatched:
            return
        mine = [index for index in self._of_module.get(name, ()) if self.plan.patches[index].kind not in MODULE_KINDS]
        self._forget(index for index in mine if index in self.applied)
        done = self._apply_ready(mine, after=name)
        while done:
            released = [index for index in sorted(self.pending) if self.plan.predecessors[index].intersection(done)]
            done = self._apply_ready(released)

    def _forget(self, reloaded: Iterable[int]) -> None:
        """Make the patches of a module that has been executed again pending again."""
        for index in list(reloaded):
            self.applied.remove(index)
            self.settled.discard(index)
            self.pending.add(index)

    def _apply_ready(self, indexes: Iterable[int], after: str = "", on_top: bool = False) -> list[int]:
        """Apply what can be applied now, in order, then rebind the copies taken before.

        With `after`, copies are looked for only in modules whose import began after that one's. With `on_top`, a
        target's place may rightly hold somebody else's object.
        """
        done = []
        for index in indexes:
            patch = self.plan.patches[index]
            ready = patch.kind not in MODULE_KINDS and self.is_executed(patch.module)
            if index in self.pending and ready and self.plan.predecessors[index] <= self.settled:
                self._apply(patch, sys.modules[patch.module], on_top)
                self._settle(index)
                done.append(index)
        if done:
            self._rebind({self.plan.patches[index].name for index in done}, modules_of(self.packages, after))
        return done

    def is_executed(self, name: str) -> bool:
        """Whether a module's code has finished; inside its own hook the import system still reports it as running."""
        return name in sys.modules and (name in self._executed or not import_under_way(sys.modules[name]))

    def _rebind(self, names: Iterable[str], searched: list[ModuleType]) -> None:
        replacements = [each for name in names for each in self.effects[name].replacements]
        for copy in copies(replacements, searched, self.packages):
            copy.rebind()
            self.rebound.append(copy.site)
            log.info("rebound %s, which held a copy taken before the patch", copy.site)

    def _settle(self, index: int) -> None:
        self.pending.discard(index)
        self.settled.add(index)
        self.applied.append(index)
        log.debug("applied %s", self.plan.patches[index].label)

    def _apply(self, patch: Patch, module: ModuleType, on_top: bool) -> None:
        effect = self.effects.get(patch.name) or Effect(patch.module, patch.qualified_name)
        if self.lock_file is not None:
            self._guarded(patch, lambda: self._note_drift(patch))
        change = functools.partial(self._change, on_top=on_top)
        act = {"add": self._add, "register": self._register}.get(patch.kind, change)
        self._guarded(patch, lambda: act(patch, module, find(module, patch.qualified_name), effect))
        self.effects[patch.name] = effect

    def _note_drift(self, patch: Patch) -> None:
        self.drift += [note for note in self._source.verify(patch) if note not in self.drift]

    def _guarded(self, patch: Patch, call: Callable[[], Any]) -> None:
        """Run one patch's part so that any error names the patch and is remembered."""
        try:
            call()
        except TargetError as error:
            raise self._error(patch, str(error), type(error)) from error
        except Exception as error:
            raise self._error(patch, f"its body raised {type(error).__name__}: {error}") from error

    def _add(self, patch: Patch, module: ModuleType, place: Place, effect: Effect) -> None:
        inherited_from_object = place.raw is vars(object).get(place.name)
        if place.exists and not inherited_from_object and place.raw is not effect.current:
            raise TargetError("upstream already has this name, so it cannot be added")
        self.called.add(patch.label)
        effect.current = patch.body(module)
        setattr(place.holder, place.name, effect.current)

    def _register(self, patch: Patch, module: ModuleType, place: Place, effect: Effect) -> None:
        mapping: Any = getattr(place.holder, place.name) if place.exists else None
        if not hasattr(mapping, "keys") or not hasattr(mapping, "__setitem__"):
            raise TargetError("no mapping here to register entries in")
        self.called.add(patch.label)
        entries = patch.body(module)
        taken = [key for key in entries if key in mapping and mapping[key] is not effect.entries.get(key)]
        if taken:
            raise TargetError(f"upstream already has these entries: {', '.join(map(repr, taken))}")
        for key, value in entries.items():
            mapping[key] = value
        effect.entries.update(entries)

    def _change(self, patch: Patch, module: ModuleType, place: Place, effect: Effect, on_top: bool) -> None:
        if not place.exists:
            raise TargetError("upstream has nothing with this name")
        elsewhere = defined_elsewhere(module, patch.qualified_name, place.raw)
        if elsewhere and not patch.only_here and place.owned and not on_top:
            raise TargetError(
                f"this is a copy of {elsewhere}. Patch it there, or set only_here=True to change this name"
            )
        if place.raw is not effect.current:
            effect.upstream = place
        if patch.kind == "wrap":
            is_on = patch.feature.is_active if patch.feature.can_be_off else None
            effect.current = wrapped(place.raw, patch.body, functools.partial(self.called.add, patch.label), is_on)
        else:
            effect.current = replaced(place.raw, patch.body)
        setattr(place.holder, place.name, effect.current)
        if place.owned and not patch.only_here:
            effect.replacements = _forwarded(effect.replacements, place, effect)

    def _error(self, patch: Patch, reason: str, kind: type[TargetError] = TargetError) -> TargetError:
        """Return the error to raise, remembered so that it still counts if upstream swallows it."""
        upstream = self.pins.of_module(patch.module)
        versions = f" Installed: {upstream.installed()}. Supported: {upstream.supported()}." if upstream else ""
        message = f"{patch.describe()}: {reason}.{versions}"
        self.failures.append(message)
        return kind(message)


def _is_in_place(effect: Effect) -> bool:
    """Whether this changed an object of upstream's own, and the place still holds what was put there."""
    if effect.upstream is None or effect.module not in sys.modules:
        return False
    try:
        return find(sys.modules[effect.module], effect.qualified_name).raw is effect.current
    except TargetError:
        return False


def _restore(effect: Effect) -> None:
    """Put back the object that was in the place before the first patch; copies stay as they are."""
    place = effect.upstream
    assert place is not None
    if place.owned:
        setattr(place.holder, place.name, place.raw)
    else:
        delattr(place.holder, place.name)
    if isinstance(place.holder, type):
        # Another class may take this name; methods of the one that was here would then be no copies of its methods.
        effect.replacements = []


def _reversed(effect: Effect) -> list[Replacement]:
    """Return the replacements that restore upstream in copies of the object that is in this place now."""
    if not effect.replacements or effect.upstream is None:
        return []
    raw, last = effect.upstream.raw, effect.replacements[-1]
    pairs = [(effect.current, raw)]
    if isinstance(raw, (staticmethod, classmethod)):
        pairs.append((effect.current.__func__, raw.__func__))
    return [Replacement(ours, upstream, last.owner, last.constant) for ours, upstream in pairs]


def _forwarded(earlier: list[Replacement], place: Place, effect: Effect) -> list[Replacement]:
    """Return all objects that have been in this place, each with the one that is there now."""
    raw, new = place.raw, effect.current
    owner = place.holder if isinstance(place.holder, type) else None
    is_function = callable(raw) or hasattr(raw, "__get__")
    constant = None if is_function else (effect.module, effect.qualified_name)
    pairs = [(old.old, new) for old in earlier if type(old.old) is type(raw)] + [(raw, new)]
    if isinstance(raw, (staticmethod, classmethod)):
        pairs += [(old.__func__, new.__func__) for old, _ in list(pairs)]
    return [Replacement(old, current, owner, constant) for old, current in pairs]
