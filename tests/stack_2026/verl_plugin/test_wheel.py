"""The wheel `verl-alltoallv`: its files, and an update of verl's own engine with nothing else of this project."""

import ast
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.stack_2026.vllm_ascend.models import write_checkpoint
from verl_plugin.alltoallv.settings import BACKEND, BACKEND_MODULE, EXTENSION, LIBRARY

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "verl_plugin" / "alltoallv"
PROGRAM = Path(__file__).with_name("wheel_program.py")
# Megatron models of the stack 2025, which the families only import to build a model.
BUILDERS = ("post_training.models.megatron", "post_training.models.mindspeed")
# No import names this file: families are discovered by folder.
UNNOTICED = "post_training/models/qwen3.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline from a copy of the files known to git, since building leaves files behind."""
    sources, made = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "verl_plugin", "post_training"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in [*listed, "LICENSE", "NOTICE"]:
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, sources / name, follow_symlinks=False)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(made)]
    build = [sys.executable, "-m", "pip", "wheel", "./verl_plugin/alltoallv", *options]
    subprocess.run(build, cwd=sources, check=True, timeout=300)
    return next(made.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with only the wheel installed."""
    folder = tmp_path_factory.mktemp("site")
    install = ["install", "-q", "--no-index", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, timeout=300)
    return folder


def source(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def imported(file: Path) -> Iterator[str]:
    """Yield every name that a file may import as a module; some are names inside modules."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def closure() -> set[str]:
    """Return the files that the plugin and the model families need, by path in the checkout."""
    families = (ROOT / "post_training" / "models").glob("*.py")
    waiting = [f"verl_plugin.alltoallv.{file.stem}" for file in FOLDER.glob("*.py") if file.stem != "__init__"]
    waiting += [f"post_training.models.{file.stem}" for file in families if "\nFAMILY = " in file.read_text()]
    found: set[str] = set()
    while waiting:
        module = waiting.pop()
        file = source(module)
        if file is None or module.startswith(BUILDERS) or str(file.relative_to(ROOT)) in found:
            continue
        found.add(str(file.relative_to(ROOT)))
        waiting += [".".join(module.split(".")[:depth]) for depth in range(1, module.count(".") + 1)]
        waiting += [name for name in imported(file) if name.partition(".")[0] in ("verl_plugin", "post_training")]
    return found


def test_wheel_holds_what_it_imports_and_no_more(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == closure() | {"hydra_plugins/verl_alltoallv.py"}


def test_metadata_names_version_licence_and_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (place,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(archive.read(place))
        licence = archive.read(place.replace("METADATA", "licenses/LICENSE"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (metadata["Name"], metadata["Version"], metadata["License"]) == (
        "verl-alltoallv", project["version"], "Apache-2.0",
    )  # fmt: skip
    assert licence == (ROOT / "LICENSE").read_bytes()
    needs = {re.match(r"[\w-]+", need)[0]: need for need in metadata.get_all("Requires-Dist")}
    assert needs.keys() == {"hydra-core", "numpy", "pyzmq", "verl"}
    assert SpecifierSet(needs["verl"].partition(";")[0].removeprefix("verl")).contains(version("verl"))
    assert metadata.get_payload() == (FOLDER / "README.md").read_text()


def test_installing_it_replaces_nothing(wheel):
    """If the wheel required verl, pip would install another torch here."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", str(wheel)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert run.stdout.splitlines()[-1] == "Would install verl-alltoallv-0.1.0"


def started(site: Path, checkpoint: Path) -> subprocess.Popen[str]:
    """Start the program with the wheel on its path, and no folder of this project."""
    kept = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ROOT]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(site), *kept]),
        "NPU_EMULATOR_NODE": f"wheel.{site.name}.{os.getpid()}",
        "NPU_EMULATOR_DEVICES": "2",
    }
    command = [sys.executable, "-P", "-W", "ignore", str(PROGRAM), str(checkpoint), str(site)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=checkpoint, env=environment, **pipes)


def test_update_with_the_wheel_alone_and_none_without_a_file(site, tmp_path):
    """Control: the second run lacks one file and must fail."""
    write_checkpoint("qwen3", tmp_path / "qwen3")
    incomplete = tmp_path / "incomplete"
    shutil.copytree(site, incomplete)
    (incomplete / UNNOTICED).unlink()
    runs = [started(folder, tmp_path / "qwen3") for folder in (site, incomplete)]
    (output, errors), (_, said) = [run.communicate(timeout=600) for run in runs]
    assert runs[0].returncode == 0, output[-2000:] + errors[-3000:]
    keys = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert keys == {"library": LIBRARY, "extension": EXTENSION, "backend": BACKEND, "module": BACKEND_MODULE}
    assert [f"rank {rank}: 0 weights differ []" in output for rank in range(2)] == [True, True]
    assert runs[1].returncode == 1 and "no sharding spec for architecture Qwen3ForCausalLM" in said
