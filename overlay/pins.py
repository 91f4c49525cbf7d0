"""The pins of every upstream, read from pins.toml, by stack if it has several."""

from __future__ import annotations

import re
import tomllib
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from overlay.errors import OverlayError

PINS_FILE = Path(__file__).with_name("pins.toml")


class PinsError(OverlayError):
    """There is no file that names the upstreams, or it has no such stack."""


class StackError(OverlayError):
    """The installed packages belong to another stack than the patches."""


@dataclass(frozen=True)
class Upstream:
    """One upstream: its packages, its patch package, and the sources of the cluster's and the release's copies.

    `folder` is the folder of its repository that holds the packages, such as `src`; empty for the repository's root.
    """

    name: str
    packages: tuple[str, ...]
    patch_package: str = ""
    repository: str = ""
    commit: str = ""
    reference: str = ""
    version: str = ""
    distribution: str = ""
    release: str = ""
    folder: str = ""

    @property
    def cluster_label(self) -> str:
        """The shortest text that names the cluster's copy."""
        return self.reference or self.commit[:8] or self.version

    def supported(self) -> str:
        """Return the supported copies in words."""
        copies = [f"cluster pin {self.cluster_label}"] if self.cluster_label else []
        if self.release:
            copies.append(f"release {self.distribution} {self.release}")
        return ", ".join(copies)

    def installed(self) -> str:
        """Return the installed version in words; a copy beside the overlay has no distribution and so no version."""
        import importlib.metadata  # tens of milliseconds, and needed for error messages only

        if not self.distribution:
            return "version unknown"
        try:
            return f"{self.distribution} {importlib.metadata.version(self.distribution)}"
        except importlib.metadata.PackageNotFoundError:
            return f"{self.distribution} without version (not installed by pip)"


@dataclass(frozen=True)
class Generator:
    """A module of the project that `update` runs: it prints what belongs into `file`, or writes its files itself."""

    module: str
    file: str = ""


@dataclass(frozen=True)
class Pins:
    """The upstreams of one stack, and the engine's other settings for a project.

    Attributes:
        accept_drift: targets whose source may differ from the lock (`*` for all).
        generated: the generators that `update` runs after writing its own files.
        middleware: lists, each `module:NAME`, whose entries each belong to a `feature`, as its patches do.
        stack: empty if the file has no stacks.
        others: the upstreams of the file's other stacks, by the stack's name.
    """

    upstreams: tuple[Upstream, ...]
    accept_drift: tuple[str, ...] = ()
    generated: tuple[Generator, ...] = ()
    middleware: tuple[str, ...] = ()
    stack: str = ""
    is_default: bool = True
    others: dict[str, tuple[Upstream, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path = PINS_FILE, stack: str = "") -> Pins:
        """Read one stack of a pins file: the named one, or else the file's default.

        Raises:
            PinsError: there is no such file, or no such stack in it.
            KeyError: an upstream without packages, or stacks without a default.
            TypeError: an unknown key.
        """
        if not file.is_file():
            raise PinsError(f"no file {file} that names the upstreams. Pass yours, as with --pins FILE")
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        if "stack" not in tables:
            if stack:
                raise PinsError(f"--stack={stack} is invalid: {file} has no stacks. Remove the option.")
            return _one_stack(tables)
        default, stacks = tables["default_stack"], tables["stack"]
        chosen = stack or default
        if chosen not in stacks:
            raise PinsError(f"--stack={chosen} is invalid: no such stack. Set it to {' or '.join(stacks)}.")
        read = {name: _one_stack(table) for name, table in stacks.items()}
        others = {name: pins.upstreams for name, pins in read.items() if name != chosen}
        return replace(read[chosen], stack=chosen, is_default=chosen == default, others=others)

    @property
    def lock_name(self) -> str:
        """The name of the file of fingerprints, beside that of the pins."""
        return "fingerprints.lock.json" if self.is_default else f"fingerprints.{self.stack}.lock.json"

    def require_environment(self) -> None:
        """Reject the installed packages if everything that tells stacks apart belongs to another stack.

        Raises:
            StackError: one sentence that names both stacks, what is installed and the remedy.
        """
        import importlib.metadata  # tens of milliseconds, and needed for files with several stacks only

        foreign: dict[str, list[str]] = {}
        for upstream in self.upstreams if self.others else ():
            try:
                version = importlib.metadata.version(upstream.distribution) if upstream.distribution else ""
            except importlib.metadata.PackageNotFoundError:
                continue
            if _is_pinned(upstream, version):
                return
            for name, others in self.others.items():
                if any(other.name == upstream.name and _is_pinned(other, version) for other in others):
                    foreign.setdefault(name, []).append(f"{upstream.distribution} {version}")
        for name, found in foreign.items():
            raise StackError(
                f"the patches of stack {self.stack} do not fit the installed packages, which are those of stack {name} "
                f"({', '.join(found)}). Use an environment of stack {self.stack}, or start without its patches"
            )

    def patch_packages(self) -> list[str]:
        """Return the names of the patch packages, in the order of the file."""
        return list(dict.fromkeys(upstream.patch_package for upstream in self.upstreams if upstream.patch_package))

    def of_module(self, module: str) -> Upstream | None:
        """Return the upstream that a module belongs to, or None."""
        for upstream in self.upstreams:
            if any(within(module, package) for package in upstream.packages):
                return upstream
        return None

    def patched_packages(self) -> tuple[str, ...]:
        """Return the packages to search for copies of a patched object: patched upstreams and patch packages."""
        patched = [upstream for upstream in self.upstreams if upstream.patch_package]
        return tuple(
            dict.fromkeys(name for upstream in patched for name in (*upstream.packages, upstream.patch_package))
        )


def within(module: str, package: str) -> bool:
    """Whether `module` is `package` or lies inside it."""
    return module == package or module.startswith(package + ".")


def _is_pinned(upstream: Upstream, version: str) -> bool:
    """Whether a version is one of an upstream's; another vendor's build (`+cpu`) and a later post-release count too."""
    pinned = {_base(each) for each in (upstream.version, upstream.release) if each}
    return bool(version) and _base(version) in pinned


def _base(version: str) -> str:
    return re.split(r"\+|\.post", version)[0]


def _one_stack(tables: dict[str, Any]) -> Pins:
    """Read the pins from the tables of a stack; its name is left empty."""
    remaining = dict(tables)
    accepted, middleware = (tuple(remaining.pop(key, ())) for key in ("accept_drift", "middleware"))
    generated = tuple(Generator(**entry) for entry in remaining.pop("generated", ()))
    return Pins(tuple(_upstream(name, table) for name, table in remaining.items()), accepted, generated, middleware)


def _patch_package(name: str, table: dict[str, Any]) -> str:
    """The key `patch_package` of an upstream, or `room`, its old name, which is accepted for one release."""
    if "room" in table:
        # Unlike a DeprecationWarning it is shown by default: its reader is the one who maintains the file.
        warnings.warn(
            f"the key room of {name} in the pins is now patch_package. Rename it", FutureWarning, stacklevel=2
        )
    return str(table.get("patch_package", table.get("room", "")))


def _upstream(name: str, table: dict[str, Any]) -> Upstream:
    release = (
        {"distribution": table["release"]["distribution"], "release": table["release"]["version"]}
        if ("release" in table)
        else {}
    )
    return Upstream(
        name=name,
        packages=tuple(table["packages"]),
        patch_package=_patch_package(name, table),
        folder=table.get("folder", ""),
        **table.get("cluster", {}),
        **release,
    )
