"""Throw-away upstream packages and patch packages for the tests of the engine."""

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from overlay import Feature, declaration
from overlay.declaration import Patch
from overlay.effective import OverlayReport, examine
from overlay.engine import Engine
from overlay.ordering import make_plan
from overlay.pins import Pins, Upstream

REPOSITORY = Path(__file__).resolve().parents[2]
TESTING = Feature("testing", "a test")
METADATA = {"feature": TESTING, "why": "a test", "upstream": "not forwarded: a test", "remove_when": "never"}
PINS = Pins(
    (
        Upstream("acme", ("acme",), "acme_patches", commit="1234567890", distribution="acme", release="1.0"),
        Upstream("other", ("other",), "other_patches", distribution="other", release="2.0"),
    )
)


class Workbench:
    """Writes packages into a folder on sys.path and runs an engine over them in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines: list[Engine] = []
        self.features: dict[str, Feature] = {}

    def write(self, files: dict[str, str]) -> None:
        """Write files (path -> dedented text) below the folder; packages get their `__init__.py`."""
        for name, text in files.items():
            file = self.folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            for parent in [file.parent, *file.parent.parents]:
                if parent == self.folder:
                    break
                if not (parent / "__init__.py").exists():
                    (parent / "__init__.py").write_text("")
            file.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()

    def patch(self, kind: str, target: str, body: Callable[..., Any], **metadata: Any) -> Patch:
        """Declare a patch with the metadata filled in, and keep it out of the process's own list.

        A feature may be given by its name; the same name is the same feature.
        """
        if isinstance(metadata.get("feature"), str):
            name = metadata["feature"]
            metadata["feature"] = self.feature(name)
        getattr(declaration, kind)(target, **{**METADATA, **metadata})(body)
        return declaration._declared.pop()

    def feature(self, name: str) -> Feature:
        """Return the feature of that name."""
        if name not in self.features:
            self.features[name] = Feature(name, "a test")
        return self.features[name]

    def activate(self, *patches: Patch) -> Engine:
        """Plan and activate patches."""
        engine = Engine(make_plan(patches), PINS)
        self.engines.append(engine)
        engine.activate()
        return engine

    def examine(self, engine: Engine) -> OverlayReport:
        """Return the report of an engine."""
        return examine(engine)

    def run(self, script: str, *arguments: str) -> str:
        """Run a script in a fresh interpreter with folder and repository on its path; returns its standard output."""
        prelude = f"import sys; sys.path[:0] = [{str(self.folder)!r}, {str(REPOSITORY)!r}]\n"
        command = [sys.executable, "-c", prelude + textwrap.dedent(script), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stderr
        return result.stdout


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbench]:
    """A workbench whose packages are removed from sys.modules after the test."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    bench = Workbench(tmp_path)
    yield bench
    for engine in bench.engines:
        if engine._finder in sys.meta_path:
            engine._finder.remove()
    for name in set(sys.modules) - known:
        if name.partition(".")[0] in ("acme", "acme_patches", "other", "other_patches", "absent"):
            del sys.modules[name]
