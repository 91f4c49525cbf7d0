"""The builds for several torch_npu in one checkout, of which each compiles in a folder of its own."""

import importlib.util
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

EMULATOR = Path(__file__).parents[2] / "npu_emulator"
VERSIONS = ("2.5.1.post1", "2.10.0.post4")


@pytest.fixture
def build(tmp_path, monkeypatch) -> ModuleType:
    """`build.py` of a copy of the emulator, for a wheel without libraries, with `ninja` in the place of the command."""
    copy = tmp_path / "npu_emulator"
    shutil.copytree(EMULATOR, copy, ignore=shutil.ignore_patterns("build", "src"))
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # which the module sets for its own process
    monkeypatch.setitem(sys.modules, "documented", SimpleNamespace(documented_demands=lambda: ""))
    spec = importlib.util.spec_from_file_location("build_of_a_copy", copy / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in (("missing_symbols", []), ("graph_engine_refusals", "")):
        monkeypatch.setattr(module, name, lambda *_, value=value: value)
    (tmp_path / "wheel" / "torch_npu" / "include").mkdir(parents=True)
    return module


def ninja(command: list[str], version: str) -> SimpleNamespace:
    """Makes the libraries that are not there, as the real one leaves those that are newer than their object files."""
    folder = Path(command[command.index("-C") + 1])
    for target in re.findall(r"^build (\S+): (?:link|name)", (folder / "build.ninja").read_text(), re.MULTILINE):
        if not (folder / target).exists():
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            (folder / target).write_text(version)
    return SimpleNamespace(returncode=0)


def test_a_package_holds_the_libraries_of_its_own_torch_npu(build, tmp_path, monkeypatch):
    """The package's folder is one for all builds of a checkout, as setuptools has it."""
    package = tmp_path / "package"
    for version in (*VERSIONS, *VERSIONS):
        monkeypatch.setattr(build, "metadata", SimpleNamespace(version=lambda _, named=version: named))
        monkeypatch.setattr(build, "subprocess", SimpleNamespace(run=partial(ninja, version=version)))
        build.build_cann(tmp_path / "wheel", package)
        for place, names in build.PLACES.items():
            assert {(package / place / name).read_text() for name in names} == {version}
        assert (package / "lib" / build.CORE).read_text() == version
