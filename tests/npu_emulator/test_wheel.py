"""The wheel npu-emulator: a machine needs only this and the torch_npu that pip installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch_npu

from tests.npu_emulator.simulated_device import seeing_device

ROOT = Path(__file__).parents[2]
PACKAGES = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
# Folder of the other packages: the emulator may be installed in an environment that only refers to them.
OTHERS = Path(torch_npu.__file__).parents[1]
NOT_THERE = ("npu_emulator", "acl", "__editable__", "__pycache__")
TRAINS = """
import os, sys
import acl, npu_emulator, torch, torch_npu
assert acl.__file__.startswith(sys.prefix) and npu_emulator.__file__.startswith(sys.prefix)
assert acl.get_soc_name() and not os.environ.get("LD_LIBRARY_PATH")
torch.manual_seed(0)
layer = torch.nn.Linear(16, 4)
x = torch.randn(8, 16)
results = []
for device in ("cpu", "npu"):
    model = torch.nn.Linear(16, 4)
    model.load_state_dict(layer.state_dict())
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.nn.functional.gelu(model(x.to(device))).square().mean().backward()
    optimizer.step()
    results.append(model.weight.detach().cpu())
assert torch.allclose(*results, atol=1e-6), (results[0] - results[1]).abs().max()
assert not torch.allclose(results[1], layer.weight, atol=1e-2), "control: the step moved the weights"
print("trained on", torch.npu.device_count())
"""


def make_environment(folder: Path, others: Path) -> Path:
    """Make an environment with links to everything installed here except the emulator; returns its folder."""
    others.mkdir()
    for path in OTHERS.iterdir():
        if path.suffix != ".pth" and not path.name.startswith(NOT_THERE):
            (others / path.name).symlink_to(path)
    venv.create(folder, with_pip=True)
    (folder / PACKAGES / "others.pth").write_text(f"{others}\n")
    return folder


def python(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = [folder / "bin" / "python", "-W", "ignore", *arguments]
    settings = kept | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the sources so that this checkout's build stays untouched."""
    folder = tmp_path_factory.mktemp("wheel")
    unbuilt = shutil.ignore_patterns("build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "npu_emulator", folder / "sources", ignore=unbuilt)
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "bdist_wheel", "-d", folder / "dist"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where ninja is
    subprocess.run(command, cwd=folder / "sources", env=os.environ | {"PATH": path}, check=True, timeout=1200)
    (made,) = (folder / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """An environment outside the repository in which pip has put the wheel."""
    folder = tmp_path_factory.mktemp("project")
    environment = make_environment(folder / "environment", folder / "others")
    before = python(environment, "-c", "import torch, torch_npu", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert before.returncode and ".so: cannot open shared object file" in before.stderr, "control: no CANN without it"
    ended = python(environment, "-m", "pip", "install", "--no-deps", "--no-index", "-q", str(wheel))
    assert ended.returncode == 0, ended.stderr
    return environment


@pytest.mark.exhaustive
def test_it_trains_beside_the_published_torch_npu(installed):
    ended = python(installed, "-c", TRAINS)
    assert ended.returncode == 0 and ended.stdout == "trained on 8\n", ended.stderr


@pytest.mark.exhaustive
def test_it_runs_the_tests_of_a_project_on_dies_of_their_own(installed):
    asks = "import torch; print(torch.ones(1, device='npu:2').item(), torch.npu.device_count())"
    ended = python(
        installed, "-m", "npu_emulator", "run", "--devices", "3", "--", f"{installed}/bin/python", "-c", asks
    )
    assert (ended.returncode, ended.stdout) == (0, "1.0 3\n"), ended.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", [True, False])
def test_emulator_is_not_used_beside_a_real_npu(installed, device):
    """Python itself stays unchanged: pip must be able to uninstall the wheel."""
    program = seeing_device("import torch_npu", device=device)
    ended = python(installed, "-c", program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (ended.returncode == 0) != device, ended.stderr
    assert ("beside a real NPU; found the device file /dev/davinci0" in ended.stderr) == device


@pytest.mark.exhaustive
def test_it_holds_no_file_of_torch_npu_and_nothing_for_one_python(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tags = wheel.stem.split("-")
    assert tags[:4] == ["npu_emulator", "0.1.0", "py3", "none"] and tags[4].startswith("linux_")
    # Platforms may keep what is not for them alone elsewhere; installers put both into site-packages.
    installed = {name.removeprefix("npu_emulator-0.1.0.data/purelib/") for name in names}
    roots = {name.split("/")[0] for name in installed}
    assert roots == {"acl", "npu_emulator", "npu_emulator.pth", "npu_emulator-0.1.0.dist-info"}
    assert not [name for name in names if "torch_npu" in name or "cpython" in name or name.endswith(".pyc")]
    libraries = {f"npu_emulator/lib/{name}" for name in ("libascendcl.so", "libhccl.so", "libopapi.so", "libatb.so")}
    assert libraries | {"acl/rt.py", "npu_emulator/meters.py", "npu_emulator/toolkit/bin/msprof"} < installed
