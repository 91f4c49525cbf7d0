"""Activate an overlay in every process of a Python that imports a package, whatever its entry point is.

`install` puts two files into the site-packages of a Python: a copy of this one, which ends in a call of `watch`, and a
.pth file that imports it whenever that Python starts. Nothing else happens then: the patches come with the first import
of the package, and a process that never imports it pays for one small class. The copy imports nothing of
this package, which need not be on the path of a Python that starts elsewhere; so it repeats a little of hooks.py.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing's own would be imported at every start of Python
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from pathlib import Path
    from types import ModuleType
    from typing import Any


def watch(package: str, prelude: str, root: str) -> None:
    """Import the module `prelude` right before the code of `package` is executed, once in this process.

    Args:
        package: the package whose import starts it all.
        prelude: a module that activates the overlay when it is imported.
        root: the folder from which it is imported where it is not on the path.
    """
    known = [each for each in sys.meta_path if getattr(each, "watched", None) == package]
    if not known and package not in sys.modules:
        sys.meta_path.insert(0, _Finder(package, prelude, root))


class _Finder:
    """A meta-path finder that lets the others find the package and only takes part when its code is executed.

    To look for a package, as `importlib.util.find_spec` does, is no import.
    """

    def __init__(self, package: str, prelude: str, root: str) -> None:
        self.watched = package
        self._prelude = prelude
        self._root = root

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the others, with a loader that activates the overlay first."""
        if name != self.watched:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if finder is not self and find else None
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def activate(self) -> None:
        """Leave the meta path and import the prelude.

        Raises:
            ImportError: the patches are gone; the package must not be imported without them unnoticed.
        """
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        if not self._is_imported():
            sys.path.append(self._root)
            if not self._is_imported():
                raise ImportError(
                    f"{self.watched} should be imported with the patches of {self._root}, but {self._prelude} does not "
                    f"exist. Put them back, or remove {__file__} and its .pth file"
                )

    def _is_imported(self) -> bool:
        """Import the prelude; False if it is not on the path. Errors of its own imports are raised."""
        import importlib

        importlib.invalidate_caches()
        try:
            importlib.import_module(self._prelude)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{self._prelude}.".startswith(f"{error.name}."):
                return False
            raise
        return True


class _Loader:
    """Stands in for the package's loader until its code is executed, then gives it its own loader back."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the real loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Activate the overlay, then execute the package as the real loader does."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._finder.activate()
        self._loader.exec_module(module)


def files_of(package: str, site_packages: Path) -> tuple[Path, Path]:
    """Return the .pth file and the module that `install` writes for a package."""
    name = f"patch_overlay_{package}"
    return site_packages / f"{name}.pth", site_packages / f"{name}.py"


def install(package: str, prelude: str, root: Path, site_packages: Path) -> None:
    """Make every process of the Python with these site-packages activate the overlay before it imports `package`.

    Raises:
        OSError: the folder cannot be written.
    """
    pth, module = files_of(package, site_packages)
    with open(__file__, encoding="utf-8") as own:
        text = own.read()
    module.write_text(f"{text}\n\nwatch({package!r}, {prelude!r}, {str(root.resolve())!r})\n", encoding="utf-8")
    # Python reads it at the next start, so the module that it names has to be there first.
    pth.write_text(f"import {module.stem}\n", encoding="utf-8")


def remove(package: str, site_packages: Path) -> bool:
    """Remove the two files and what Python compiled of them; returns whether there were any.

    Raises:
        OSError: the folder cannot be written.
    """
    from importlib.util import cache_from_source
    from pathlib import Path

    pth, module = files_of(package, site_packages)
    there = [file for file in (pth, module) if file.exists()]
    for file in there:
        file.unlink()
    Path(cache_from_source(str(module))).unlink(missing_ok=True)
    return bool(there)


def installed_root(package: str, site_packages: Path) -> Path | None:
    """Return the folder whose patches an import of `package` activates; None if nothing was installed."""
    import ast
    from pathlib import Path

    pth, module = files_of(package, site_packages)
    if not pth.exists() or not module.exists():
        return None
    call = ast.parse(module.read_text(encoding="utf-8")).body[-1]
    assert isinstance(call, ast.Expr) and isinstance(call.value, ast.Call), "install ends the file in a call"
    return Path(ast.literal_eval(call.value.args[-1]))
