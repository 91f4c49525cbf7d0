"""The workspace that scripts/assemble_workspace.sh makes from checkouts at the cluster's pins.

Needs checkouts: ``bash scripts/test.sh tests/upstream --upstream FOLDER`` (see README.md here). A checkout without git
cannot show its commit, so `overlay check`, which the script runs, decides whether its sources are those of the pins.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("verl", "vllm", "vllm_ascend", "megatron", "mindspeed", "mindspeed_llm")
PRELUDE = "from verl_patches import prelude_patch"


def vllm_sources(folder: Path) -> Path:
    """vLLM as its source distribution has it, without compiled libraries: the release here is that of the pin."""
    installed = Path(importlib.util.find_spec("vllm").origin).parent
    shutil.copytree(installed, folder / "vllm", ignore=shutil.ignore_patterns("*.so*", "__pycache__"))
    return folder


def environment(workspace: Path) -> dict[str, str]:
    own = {"PYTHON": sys.executable, "PYTHONPATH": str(workspace)}
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own


@pytest.fixture(scope="module")
def workspace(upstream, tmp_path_factory) -> Path:
    """This repository with the upstream packages beside its patch folders."""
    folder = tmp_path_factory.mktemp("cluster") / "workspace"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    sources = upstream if (upstream / "vllm").is_dir() else vllm_sources(tmp_path_factory.mktemp("vllm"))
    given = [f"vllm={sources / 'vllm' if sources == upstream else sources}"]
    assembled = subprocess.run(
        ["bash", "scripts/assemble_workspace.sh", "--from", str(upstream), *given, "--any-commit"],
        cwd=folder, env=environment(folder), capture_output=True, text=True,
    )  # fmt: skip
    assert assembled.returncode == 0, assembled.stdout[-2000:] + assembled.stderr[-4000:]
    assert "clean" in assembled.stdout.splitlines()
    return folder


def test_every_package_comes_from_the_workspace(workspace):
    program = (
        "import sys, importlib.util as u; print(*(u.find_spec(n).submodule_search_locations[0] for n in sys.argv[1:]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, *PACKAGES], cwd=workspace, env=environment(workspace),
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert found == [str(workspace / name) for name in PACKAGES]


def test_the_worker_of_the_pin_turns_the_overlay_on_and_the_patch_series_applies(workspace):
    assert PRELUDE in (workspace / "verl" / "workers" / "megatron_workers.py").read_text()
    changed = [line.removeprefix("+++ b/") for line in series_of(workspace) if line.startswith("+++ b/")]
    assert changed and all((workspace / name).is_file() for name in changed)


def series_of(workspace: Path) -> list[str]:
    """All lines of the patches in vllm_ascend_patches/series."""
    folder = workspace / "vllm_ascend_patches"
    names = [line.strip() for line in (folder / "series").read_text().splitlines()]
    return [
        line for name in names if name and not name.startswith("#") for line in (folder / name).read_text().splitlines()
    ]


def test_a_checkout_that_does_not_fit_changes_nothing(upstream, workspace, tmp_path):
    spoilt = shutil.copytree(upstream / "verl", tmp_path / "verl", ignore=shutil.ignore_patterns(".git"))
    registry = spoilt / "verl" / "models" / "mcore" / "registry.py"
    registry.write_text(registry.read_text().replace("def init_mcore_model(", "def init_another_model("))
    before = (workspace / "verl" / "models" / "mcore" / "registry.py").read_bytes()
    refused = subprocess.run(
        ["bash", "scripts/assemble_workspace.sh", "--from", str(upstream), f"vllm={workspace}", f"verl={spoilt}",
         "--any-commit"],
        cwd=workspace, env=environment(workspace), capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode != 0 and "do not fit the patches" in refused.stdout + refused.stderr
    assert (workspace / "verl" / "models" / "mcore" / "registry.py").read_bytes() == before
