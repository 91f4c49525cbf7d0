"""Declares patches: each is one decorated function in a file of a patch package.

The decorators record the patch and return the function unchanged, so that tests can call it directly. They import
nothing of upstream. A target is written `package.module:Qualified.name`; for `before_import` and `provide` it is a
module name alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Required, TypedDict, TypeVar, Unpack

from overlay.errors import DeclarationError
from overlay.feature import Feature

Kind = Literal["wrap", "replace", "add", "register", "before_import", "provide"]
Evidence = Literal["executed", "checked", "hardware only"]
Body = TypeVar("Body", bound=Callable[..., Any])

MODULE_KINDS = ("before_import", "provide")
EVIDENCE = ("executed", "checked", "hardware only")
_SEQUENCES = ("relies_on", "after", "outside", "inside")
# A patch that names neither corrects nothing upstream; it is part of a feature of this project.
OF_THIS_PROJECT = {
    "upstream": "not forwarded: part of this project's features",
    "remove_when": "never: it is part of this project's features",
}


class Metadata(TypedDict, total=False):
    """The metadata of a declaration, beside its target.

    Attributes:
        feature: The feature to which the patch belongs, which may have a switch.
        why: How upstream behaves, and why that has to change.
        upstream: The issue or pull request that deals with it, the path of a draft under docs/upstream, or
            `not forwarded: reason`. Left out, with `remove_when`, where the patch corrects nothing and is part of a
            feature of this project.
        remove_when: The upstream change with which the patch can go.
        relies_on: Other targets that the body depends on, so that their changes count as drift too.
        outside, inside: Names of features whose wraps of this target are called inside this one, or around it.
        after: Names or labels of patches of other targets, which are applied first.
        only_here: Change this one name, and not the copies of it elsewhere.
        evidence: Whether the rehearsal executes the patch, a test checks it, or only hardware can.
    """

    feature: Required[Feature]
    why: Required[str]
    upstream: str
    remove_when: str
    relies_on: Sequence[str]
    outside: Sequence[str]
    inside: Sequence[str]
    after: Sequence[str]
    only_here: bool
    evidence: Evidence


@dataclass(frozen=True)
class Patch:
    """One declared change of one target.

    `name` is the target. Several wraps of one target share the name; `label` (`target@feature`) tells them apart.
    """

    kind: Kind
    target: str
    body: Callable[..., Any] = field(repr=False, compare=False)
    feature: Feature
    why: str
    upstream: str
    remove_when: str
    relies_on: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    only_here: bool = False
    evidence: Evidence = "checked"

    @property
    def name(self) -> str:
        """The target, which is how other patches and the reports name this one."""
        return self.target

    @property
    def label(self) -> str:
        """`target@feature`, unique among the patches of one kind."""
        return f"{self.target}@{self.feature.name}"

    @property
    def switch(self) -> str:
        """The configuration key of its feature's switch; empty if it is always on."""
        return self.feature.switch

    @property
    def module(self) -> str:
        """The upstream module that holds the target (or is it)."""
        return self.target.partition(":")[0]

    @property
    def qualified_name(self) -> str:
        """The target's path inside its module; empty for kinds whose target is a module."""
        return self.target.partition(":")[2]

    @property
    def declared_in(self) -> str:
        """The module of the patch file."""
        return self.body.__module__

    @property
    def line(self) -> int:
        """The line in the patch file where the body starts; 0 if the body is not a plain function."""
        code = getattr(self.body, "__code__", None)
        return code.co_firstlineno if code else 0

    def describe(self) -> str:
        """Return one line that identifies the patch in error messages."""
        return f"{self.kind} of {self.target} (feature {self.feature.name}, declared in {self.declared_in}:{self.line})"


_declared: list[Patch] = []


def declared() -> list[Patch]:
    """Return every patch declared so far in this process, in the order of declaration."""
    return list(_declared)


def patches_of(feature: Feature) -> list[Patch]:
    """Return the patches of a feature in all patch files that have been loaded."""
    return [patch for patch in _declared if patch.feature is feature]


def wrap(target: str, **metadata: Unpack[Metadata]) -> Callable[[Body], Body]:
    """Call the decorated function with the original callable first, then with the call's own arguments.

    While its feature is off, the original is called in its place.
    If the target is a value that cannot be called, the function gets that value and returns the one to put there.

    Args:
        target: `package.module:Qualified.name`.
        metadata: See `Metadata`.

    Raises:
        DeclarationError: a malformed target, or metadata that is missing, empty or unknown.
    """
    return _declare("wrap", target, metadata)


def replace(target: str, **metadata: Unpack[Metadata]) -> Callable[[Body], Body]:
    """Install the decorated function itself in place of the target; metadata as for `wrap`.

    If the target is a value that cannot be called, the function is called without arguments and its result installed.
    """
    return _declare("replace", target, metadata)


def add(target: str, **metadata: Unpack[Metadata]) -> Callable[[Body], Body]:
    """Add the object that the decorated `build(module)` returns where upstream has none; metadata as for `wrap`."""
    return _declare("add", target, metadata)


def register(target: str, **metadata: Unpack[Metadata]) -> Callable[[Body], Body]:
    """Merge the dict that the decorated `entries(module)` returns into the target mapping; metadata as for `wrap`."""
    return _declare("register", target, metadata)


def before_import(target: str, **metadata: Unpack[Metadata]) -> Callable[[Body], Body]:
    """Run the decorated function, without arguments, just before module `target` is executed; metadata as `wrap`."""
    return _declare("before_import", target, metadata)


def provide(target: str, **metadata: Unpack[Metadata]) -> Callable[[Body], Body]:
    """Stand in for the absent module `target` with what the decorated `build(name) -> ModuleType` returns.

    It is built when upstream first reads from it, and only if the real module cannot be found. Its parent packages stay
    absent, so `from parent.module import name` works and a probe for `parent` still finds nothing.
    """
    return _declare("provide", target, metadata)


def _declare(kind: Kind, target: str, metadata: Metadata) -> Callable[[Body], Body]:
    _check_target(kind, target)
    fields: dict[str, Any] = {**metadata}
    if not fields.keys() & OF_THIS_PROJECT.keys():
        fields |= OF_THIS_PROJECT
    _check_metadata(kind, target, fields)
    for sequence in _SEQUENCES:
        fields[sequence] = _texts(target, sequence, fields.get(sequence, ()))

    def record(body: Body) -> Body:
        _declared.append(Patch(kind=kind, target=target, body=body, **fields))
        return body

    return record


def _check_target(kind: Kind, target: str) -> None:
    module, colon, name = target.partition(":")
    parts = module.split(".") + (name.split(".") if colon else [])
    if bool(colon) == (kind in MODULE_KINDS) or not all(part.isidentifier() for part in parts):
        form = "package.module" if kind in MODULE_KINDS else "package.module:Qualified.name"
        raise DeclarationError(f"{kind} of {target!r}: the target must be written {form}")


def _check_metadata(kind: Kind, target: str, metadata: dict[str, Any]) -> None:
    required = ("feature", "why", "upstream", "remove_when")
    optional = (*_SEQUENCES, "only_here", "evidence")
    missing = [key for key in required if not str(metadata.get(key, "")).strip()]
    unknown = sorted(set(metadata) - {*required, *optional})
    if missing or unknown:
        faults = [f"{word} {', '.join(keys)}" for word, keys in (("missing", missing), ("unknown", unknown)) if keys]
        raise DeclarationError(f"{kind} of {target!r}: {'; '.join(faults)}")
    if not isinstance(metadata["feature"], Feature):
        raise DeclarationError(f"{kind} of {target!r}: feature must be a Feature object, not {metadata['feature']!r}")
    if kind != "wrap" and metadata["feature"].can_be_off:
        raise DeclarationError(
            f"{kind} of {target!r}: feature {metadata['feature'].name} can be off, but only a wrap checks that at "
            "every call. Declare it as a wrap"
        )
    if metadata.get("evidence", EVIDENCE[0]) not in EVIDENCE:
        raise DeclarationError(f"{kind} of {target!r}: evidence must be one of {', '.join(EVIDENCE)}")


def _texts(target: str, key: str, value: Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(item, str) for item in value):
        raise DeclarationError(f"patch of {target!r}: {key} must be a list of texts")
    return tuple(value)
