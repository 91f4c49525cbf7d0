"""Check the declared patches against each other and put them in the one order in which they are applied.

This runs before anything is changed. The order depends on the declarations only, never on what is imported first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overlay.declaration import Patch
from overlay.errors import ConflictError


@dataclass(frozen=True)
class PatchOrder:
    """The patches in their order, and for each the patches that must be applied before it (indexes into `patches`)."""

    patches: tuple[Patch, ...]
    predecessors: tuple[frozenset[int], ...]

    def by_module(self) -> dict[str, list[int]]:
        """Return the indexes of the patches of each target module, in order."""
        modules: dict[str, list[int]] = {}
        for index, patch in enumerate(self.patches):
            modules.setdefault(patch.module, []).append(index)
        return modules


def make_plan(patches: Sequence[Patch]) -> PatchOrder:
    """Order patches; `patches` comes in the order of files and lines, which decides where nothing else does.

    Raises:
        ConflictError: with every conflict found.
    """
    checks = (_exclusive, _repeated, _unknown_after, _unknown_neighbour, _two_of_one_name)
    conflicts = [conflict for check in checks for conflict in check(patches)]
    if conflicts:
        raise ConflictError("the declared patches conflict:\n  " + "\n  ".join(conflicts))
    edges = _edges(patches)
    order = _sorted(patches, edges)
    position = {old: new for new, old in enumerate(order)}
    predecessors = [{position[before] for before in edges[old]} for old in order]
    ordered = tuple(patches[old] for old in order)
    _chain_same_target(ordered, predecessors)
    return PatchOrder(ordered, tuple(frozenset(before) for before in predecessors))


def _exclusive(patches: Sequence[Patch]) -> Iterable[str]:
    """Report targets with more than one `replace`, `add` or `provide`."""
    owners: dict[str, Patch] = {}
    for patch in patches:
        if patch.kind in ("replace", "add", "provide"):
            first = owners.setdefault(patch.target, patch)
            if first is not patch:
                yield f"{first.describe()} and {patch.describe()} both define the target"


def _repeated(patches: Sequence[Patch]) -> Iterable[str]:
    """Report patches of one kind and one feature on one target: reports and `after` could not tell them apart."""
    seen: dict[tuple[str, str], Patch] = {}
    for patch in patches:
        first = seen.setdefault((patch.kind, patch.label), patch)
        if first is not patch and patch.kind in ("wrap", "before_import"):
            yield f"{first.describe()} and {patch.describe()} are the same feature on the same target. Make them one"


def _unknown_after(patches: Sequence[Patch]) -> Iterable[str]:
    known = {patch.name for patch in patches} | {patch.label for patch in patches}
    for patch in patches:
        for name in patch.after:
            if name not in known:
                yield f"{patch.describe()} has after={name!r}, which names no patch"


def _unknown_neighbour(patches: Sequence[Patch]) -> Iterable[str]:
    known = {(patch.target, patch.feature.name) for patch in patches}
    for patch in patches:
        for word, names in (("outside", patch.outside), ("inside", patch.inside)):
            for name in names:
                if (patch.target, name) not in known:
                    yield f"{patch.describe()} has {word}={name!r}, but no patch of this target belongs to that feature"


def _two_of_one_name(patches: Sequence[Patch]) -> Iterable[str]:
    """Report features that share a name: a feature is one object with its configuration and its switch."""
    owners: dict[str, Patch] = {}
    for patch in patches:
        first = owners.setdefault(patch.feature.name, patch)
        if first.feature is not patch.feature:
            yield f"{first.describe()} and {patch.describe()} belong to two Feature objects with one name"


def _edges(patches: Sequence[Patch]) -> list[set[int]]:
    """Return for each patch the indexes of those that must come before it."""
    makers = [index for index, patch in enumerate(patches) if patch.kind in ("add", "replace")]
    edges: list[set[int]] = []
    for later, patch in enumerate(patches):
        after = set(patch.after)
        named = [index for index, other in enumerate(patches) if after & {other.name, other.label}] if after else []
        made = [index for index in makers if _comes_first(patches[index], patch)]
        within = [index for index, other in enumerate(patches) if _is_called_inside(other, patch)]
        edges.append({*named, *made, *within} - {later})
    return edges


def _is_called_inside(other: Patch, patch: Patch) -> bool:
    """Whether `other` is applied first, so that `patch` is around it."""
    if other.target != patch.target:
        return False
    return other.feature.name in patch.outside or patch.feature.name in other.inside


def _comes_first(other: Patch, patch: Patch) -> bool:
    """Whether `other` creates the target that `patch` changes, or the class or namespace that holds it."""
    if other.module != patch.module:
        return False
    if other.target == patch.target:
        return patch.kind not in ("add", "replace")
    return patch.target.startswith(other.target + ".")


def _sorted(patches: Sequence[Patch], edges: list[set[int]]) -> list[int]:
    waiting = [set(before) for before in edges]
    ready = [index for index, before in enumerate(waiting) if not before]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        done = heapq.heappop(ready)
        order.append(done)
        for index, before in enumerate(waiting):
            if done in before:
                before.remove(done)
                if not before:
                    heapq.heappush(ready, index)
    if len(order) < len(patches):
        stuck = [patches[index].label for index in range(len(patches)) if waiting[index]]
        raise ConflictError(f"the declared patches wait for each other in a cycle: {', '.join(stuck)}")
    return order


def _chain_same_target(ordered: Sequence[Patch], predecessors: list[set[int]]) -> None:
    """Make each patch wait for the previous one of its target, so that nesting never depends on import order."""
    last: dict[str, int] = {}
    for index, patch in enumerate(ordered):
        if patch.target in last:
            predecessors[index].add(last[patch.target])
        last[patch.target] = index
