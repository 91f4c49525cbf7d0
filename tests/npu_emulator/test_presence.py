"""The emulator cannot be installed or used beside a real NPU."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from npu_emulator import presence
from tests.npu_emulator.simulated_device import seeing_device

SETUP = Path(__file__).parents[2] / "npu_emulator" / "setup.py"


@pytest.fixture
def bare_machine(tmp_path) -> dict:
    (tmp_path / "dev").mkdir()
    return {"device_directory": tmp_path / "dev", "driver_directory": tmp_path / "driver"}


def test_a_bare_machine_is_accepted(bare_machine):
    assert presence.find_real_npu(**bare_machine) is None
    presence.refuse_real_npu(**bare_machine)


def test_a_device_file_rejected_by_name(bare_machine):
    (bare_machine["device_directory"] / "davinci0").touch()
    with pytest.raises(RuntimeError, match="beside a real NPU; found the device file .*davinci0"):
        presence.refuse_real_npu(**bare_machine)


def test_the_manager_alone_is_no_device(bare_machine):
    (bare_machine["device_directory"] / "davinci_manager").touch()
    assert presence.find_real_npu(**bare_machine) is None


def test_a_driver_rejected(bare_machine):
    bare_machine["driver_directory"].mkdir()
    with pytest.raises(RuntimeError, match="found the driver"):
        presence.refuse_real_npu(**bare_machine)


def test_installation_checks_the_machine(bare_machine, monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")  # which setup.py changes, for its own process
    check_machine = runpy.run_path(str(SETUP), run_name="not the installer")["check_machine"]
    check_machine(**bare_machine)
    (bare_machine["device_directory"] / "davinci3").touch()
    with pytest.raises(RuntimeError, match="davinci3"):
        check_machine(**bare_machine)


@pytest.mark.parametrize("device", [True, False])
def test_import_of_torch_npu_checks_the_machine(device):
    """The check runs before a library of the emulated CANN is loaded; Python itself starts as elsewhere."""
    program = seeing_device("import torch_npu; print('imported')", device=device)
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PATH": "/usr/bin"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (ended.returncode == 0, ended.stdout) == ((False, "") if device else (True, "imported\n")), ended.stderr
    assert ("npu-emulator does not install or run beside a real NPU; found the device" in ended.stderr) == device
