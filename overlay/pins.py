"""The pins of every upstream, read from pins.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlay.errors import OverlayError

PINS_FILE = Path(__file__).with_name("pins.toml")


class PinsError(OverlayError):
    """There is no file that names the upstreams."""


@dataclass(frozen=True)
class Upstream:
    """One upstream: its packages, the room of its patches, and where the cluster's and the release's copies are.

    `folder` is the folder of its repository that the packages lie in, such as `src`; empty for the repository's root.
    """

    name: str
    packages: tuple[str, ...]
    room: str = ""
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
        """The supported copies in words."""
        copies = [f"cluster pin {self.cluster_label}"] if self.cluster_label else []
        if self.release:
            copies.append(f"release {self.distribution} {self.release}")
        return ", ".join(copies)

    def installed(self) -> str:
        """What is installed here in words; a copy beside the overlay has no distribution and so no version."""
        import importlib.metadata  # tens of milliseconds, and needed for error messages only

        if not self.distribution:
            return "version unknown"
        try:
            return f"{self.distribution} {importlib.metadata.version(self.distribution)}"
        except importlib.metadata.PackageNotFoundError:
            return f"{self.distribution} without version (a copy that is not installed by pip, or none)"


@dataclass(frozen=True)
class Generator:
    """A module of the project that `update` runs: it prints what belongs into `file`, or writes its files itself."""

    module: str
    file: str = ""


@dataclass(frozen=True)
class Pins:
    """All upstreams, and what else the engine is told about a project.

    accept_drift: targets whose source may differ from the lock (`*` for all). generated: what `update` runs after its
    own files. middleware: lists, each `module:NAME`, whose entries each belong to a `feature`, as its patches do.
    """

    upstreams: tuple[Upstream, ...]
    accept_drift: tuple[str, ...] = ()
    generated: tuple[Generator, ...] = ()
    middleware: tuple[str, ...] = ()

    @classmethod
    def read(cls, file: Path = PINS_FILE) -> Pins:
        """Read a pins file.

        Raises:
            PinsError: there is no such file.
            KeyError: an upstream without packages.
            TypeError: an unknown key.
        """
        if not file.is_file():
            raise PinsError(f"there is no file {file} that names the upstreams; name yours, as with --pins FILE")
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        accepted, middleware = (tuple(tables.pop(key, ())) for key in ("accept_drift", "middleware"))
        generated = tuple(Generator(**entry) for entry in tables.pop("generated", ()))
        upstreams = tuple(_upstream(name, table) for name, table in tables.items())
        return cls(upstreams, accepted, generated, middleware)

    def rooms(self) -> list[str]:
        """The names of the patch rooms, in the order of the file."""
        return [upstream.room for upstream in self.upstreams if upstream.room]

    def of_module(self, module: str) -> Upstream | None:
        """The upstream that a module belongs to, or None."""
        for upstream in self.upstreams:
            if any(within(module, package) for package in upstream.packages):
                return upstream
        return None

    def patched_packages(self) -> tuple[str, ...]:
        """The packages in which copies of a patched object are looked for: upstreams with a room, and the rooms."""
        patched = [upstream for upstream in self.upstreams if upstream.room]
        return tuple(package for upstream in patched for package in (*upstream.packages, upstream.room))


def within(module: str, package: str) -> bool:
    """Whether `module` is `package` or lies inside it."""
    return module == package or module.startswith(package + ".")


def _upstream(name: str, table: dict[str, Any]) -> Upstream:
    release = (
        {"distribution": table["release"]["distribution"], "release": table["release"]["version"]}
        if ("release" in table)
        else {}
    )
    return Upstream(
        name=name,
        packages=tuple(table["packages"]),
        room=table.get("room", ""),
        folder=table.get("folder", ""),
        **table.get("cluster", {}),
        **release,
    )
