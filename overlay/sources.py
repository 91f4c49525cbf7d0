"""Read upstream's source, module by module, from a folder or a commit of a git repository, without importing it."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import OverlayError
from overlay.pins import Upstream, within


class SourceError(OverlayError):
    """The requested source cannot be read, so it cannot be checked."""


@dataclass(frozen=True)
class Sources:
    """The modules of some packages: name -> (bytes, whether it is a package). `origin` names the source in words."""

    origin: str
    modules: dict[str, tuple[bytes, bool]]

    def text(self, module: str) -> bytes | None:
        """Return the source of a module, or None if there is no such module."""
        entry = self.modules.get(module)
        return entry[0] if entry else None

    def has(self, module: str) -> bool:
        """Whether there is such a module, or a package without its own file."""
        return module in self.modules or any(within(name, module) for name in self.modules)


def from_folder(folder: Path, packages: Sequence[str]) -> Sources:
    """Read the packages below a folder (a checkout, a workspace, site-packages), or the folder of a single package.

    Raises:
        SourceError: the folder does not hold them.
    """
    modules: dict[str, tuple[bytes, bool]] = {}
    for package in packages:
        root = folder if folder.name == package and not (folder / package).is_dir() else folder / package
        if not root.is_dir():
            raise SourceError(f"no package {package} in {folder}")
        for file in root.rglob("*.py"):
            _put(modules, f"{package}/{file.relative_to(root).as_posix()}", file.read_bytes())
    return Sources(str(folder), modules)


def from_commit(repository: Path, commit: str, packages: Sequence[str], folder: str = "") -> Sources:
    """Read the packages in a commit of a local git repository, or in a folder of it.

    Raises:
        SourceError: git cannot read it.
    """
    command = [
        "git",
        "-C",
        str(repository),
        "archive",
        "--format=tar",
        f"{commit}:{folder}" if folder else commit,
        *packages,
    ]
    result = subprocess.run(command, capture_output=True, check=False)
    if result.returncode != 0:
        raise SourceError(
            f"git has no {commit} with {', '.join(packages)} in {repository}: {_last_line(result.stderr)}"
        )
    modules: dict[str, tuple[bytes, bool]] = {}
    with tarfile.open(fileobj=io.BytesIO(result.stdout)) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.name.endswith(".py") else None
            if content is not None:
                _put(modules, member.name, content.read())
    return Sources(f"{repository} at {commit}", modules)


def installed(upstream: Upstream) -> Sources | None:
    """Read the packages as they would be imported here; None if they are not installed."""
    modules: dict[str, tuple[bytes, bool]] = {}
    origin = ""
    for package in upstream.packages:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            modules.update(from_folder(Path(folder), [package]).modules)
            origin = f"{upstream.installed()} in {Path(folder).parent}"
    return Sources(origin, modules) if modules else None


def module_of(path: str) -> tuple[str, bool]:
    """Return the module of a file below the packages' parent folder, and whether it is a package."""
    parts = path.removesuffix(".py").split("/")
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


def _put(modules: dict[str, tuple[bytes, bool]], path: str, content: bytes) -> None:
    name, is_package = module_of(path)
    modules[name] = (content, is_package)


def _last_line(output: bytes) -> str:
    return (output.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
