"""The package makes a wheel that works from wherever it is unpacked, and none beside a real NPU."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import npu_emulator
from tests.npu_emulator.simulated_device import seeing_device

PACKAGE = Path(__file__).parents[2] / "npu_emulator"

SET_UP = """
import runpy, sys
sys.argv = ["setup.py", "--version"]
runpy.run_path("setup.py", run_name="__main__")
"""

USE = """
import acl, npu_emulator, torch, torch_npu, torchair
for module in (npu_emulator, torch_npu, acl, torchair):
    print(module.__file__)
assert (torch.ones(2, device="npu") * 3).tolist() == [3, 3]
assert torch_npu.npu_swiglu(torch.ones(1, 4, device="npu")).shape == (1, 2)
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A copy, since building leaves files beside the sources."""
    copy = tmp_path_factory.mktemp("sources") / "npu_emulator"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    return copy


@pytest.fixture(scope="module")
def wheel(sources) -> Path:
    """Packed with the extension module that is installed, which was compiled from these sources."""

    def setup(*commands: str) -> None:
        subprocess.run([sys.executable, "setup.py", "-q", *commands], cwd=sources, check=True, timeout=300)

    setup("build_py")
    (packages,) = (sources / "build").glob("lib*/npu_emulator")
    shutil.copy(npu_emulator._C.__file__, packages)
    setup("bdist_wheel", "--skip-build")
    (made,) = (sources / "dist").glob("*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_works_where_it_is_unpacked(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    ended = subprocess.run([sys.executable, "-c", USE], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    files = ended.stdout.split()
    assert len(files) == 4 and all(file.startswith(str(tmp_path)) for file in files), files


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    sources = [path.relative_to(PACKAGE / "src") for path in (PACKAGE / "src").rglob("*")]
    packages = [path for path in sources if not path.parts[0].endswith(".egg-info")]  # which building may leave there
    wanted = {str(path) for path in packages if path.suffix in (".py", ".txt", ".json", ".pth")}
    assert {"torch_npu/__init__.py", "acl/rt.py", "npu_emulator/reached_operators.json"} < wanted
    wanted.add(f"npu_emulator/{Path(npu_emulator._C.__file__).name}")
    assert {name for name in names if not name.startswith("npu_emulator-0.1.0.dist-info/")} == wanted
    with zipfile.ZipFile(wheel) as archive:
        assert "torch_npu:_autoload" in archive.read("npu_emulator-0.1.0.dist-info/entry_points.txt").decode()


@pytest.mark.parametrize("device", [True, False])
def test_the_installer_refuses_a_machine_with_a_device_file(sources, device):
    program = seeing_device(SET_UP, device=device)
    ended = subprocess.run([sys.executable, "-c", program], cwd=sources, capture_output=True, text=True)
    if device:
        assert ended.returncode != 0
        assert "does not install or run beside a real NPU; found the device file /dev/davinci0" in ended.stderr
    else:
        assert ended.returncode == 0 and ended.stdout.split()[-1] == "0.1.0", ended.stderr
