"""The emulator refuses to be installed or used beside a real NPU."""

import importlib.metadata
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from npu_emulator import presence

SETUP = Path(__file__).parents[2] / "npu_emulator" / "setup.py"


def no_such_package(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.fixture
def bare_machine(tmp_path) -> dict:
    (tmp_path / "dev").mkdir()
    return {
        "device_directory": tmp_path / "dev",
        "driver_directory": tmp_path / "driver",
        "distribution": no_such_package,
    }


def test_a_bare_machine_is_accepted(bare_machine):
    assert presence.find_real_npu(**bare_machine) is None
    presence.refuse_real_npu(**bare_machine)


def test_a_device_file_is_refused_by_name(bare_machine):
    (bare_machine["device_directory"] / "davinci0").touch()
    with pytest.raises(RuntimeError, match="beside a real NPU; found the device file .*davinci0"):
        presence.refuse_real_npu(**bare_machine)


def test_the_manager_alone_is_no_device(bare_machine):
    (bare_machine["device_directory"] / "davinci_manager").touch()
    assert presence.find_real_npu(**bare_machine) is None


def test_a_driver_is_refused(bare_machine):
    bare_machine["driver_directory"].mkdir()
    with pytest.raises(RuntimeError, match="found the driver"):
        presence.refuse_real_npu(**bare_machine)


def test_another_torch_npu_is_refused(bare_machine):
    bare_machine["distribution"] = lambda name: name
    with pytest.raises(RuntimeError, match="found the torch-npu package"):
        presence.refuse_real_npu(**bare_machine)


def test_installation_checks_the_machine(bare_machine):
    check_machine = runpy.run_path(str(SETUP), run_name="not the installer")["check_machine"]
    check_machine(**bare_machine)
    (bare_machine["device_directory"] / "davinci3").touch()
    with pytest.raises(RuntimeError, match="davinci3"):
        check_machine(**bare_machine)


def test_import_checks_the_machine(bare_machine, tmp_path):
    """The same package, imported where its own check finds a device."""
    (bare_machine["device_directory"] / "davinci0").touch()
    program = f"""
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("npu_emulator.presence", {presence.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.refuse_real_npu.__kwdefaults__ = None
original = module.refuse_real_npu
module.refuse_real_npu = lambda: original(device_directory=pathlib.Path({str(bare_machine["device_directory"])!r}))
sys.modules["npu_emulator.presence"] = module
import npu_emulator
"""
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PATH": "/usr/bin"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert ended.returncode != 0
    assert "npu-emulator does not install or run beside a real NPU" in ended.stderr.splitlines()[-1]


def test_the_torch_npu_that_an_emulated_cann_is_for_shows_no_npu(bare_machine):
    assert presence.find_real_npu(**bare_machine | {"distribution": lambda name: object()})
    assert presence.find_real_npu(**bare_machine | {"distribution": None}) is None
