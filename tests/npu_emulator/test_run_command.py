"""``python -m npu_emulator run -- COMMAND``: the command, on dies of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
SAYS_WHAT_IT_HAS = "import torch; print(torch.npu.device_count(), torch.npu.mem_get_info(0)[1] >> 20)"
# vLLM-Ascend's and verl's own tests look like this: a device, a computation, and the same on the host.
TESTS = """
import torch

def test_a_product():
    left, right = torch.rand(4, 8), torch.rand(8, 3)
    assert torch.equal((left.to("npu") @ right.to("npu")).cpu(), left @ right)

def test_that_fails():
    assert torch.ones(1, device="npu").item() == 2
"""


def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "npu_emulator", "run", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NPU_EMULATOR_")}
    return subprocess.run(command, env=environment | settings, capture_output=True, text=True, timeout=600)


def test_the_command_has_the_dies_that_were_asked_for_whatever_is_set_outside():
    outside = {"NPU_EMULATOR_DEVICES": "5", "ASCEND_RT_VISIBLE_DEVICES": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    ran = run("--devices", "3", "--capacity", "100", "--", sys.executable, "-c", SAYS_WHAT_IT_HAS, **outside)
    assert (ran.returncode, ran.stdout) == (0, "3 100\n"), ran.stderr
    plain = subprocess.run([sys.executable, "-c", SAYS_WHAT_IT_HAS], env=os.environ | outside, capture_output=True)
    assert plain.stdout.split()[0] == b"1", "control: without the command the settings outside count"


@pytest.mark.parametrize("options, expected", [((), "0 0"), (("--strict", "--deferred"), "1 1")])
def test_modes_are_those_that_were_asked_for(options, expected):
    asks = (
        "import os; from npu_emulator import engine; import torch_npu; "
        "print(os.environ['NPU_EMULATOR_STRICT'], engine.library().npu_emulator_defer_collectives(0))"
    )
    outside = {"NPU_EMULATOR_STRICT": "1", "NPU_EMULATOR_DEFERRED_COLLECTIVES": "1"}
    ran = run(*options, "--", sys.executable, "-W", "ignore", "-c", asks, **outside)
    assert ran.stdout == f"{expected}\n", ran.stderr


@pytest.mark.parametrize("options, seed", [((), ""), (("--streams", "7"), "7")])
def test_streams_have_the_seed_that_was_asked_for_whatever_is_set_outside(options, seed):
    asks = "import os; print(os.environ['NPU_EMULATOR_STREAM_SEED'])"
    ran = run(*options, "--", sys.executable, "-c", asks, NPU_EMULATOR_STREAM_SEED="3")
    assert ran.stdout == f"{seed}\n", ran.stderr


@pytest.mark.parametrize("options, refused", [((), False), (("--strict",), True)])
def test_strict_rejects_what_the_document_of_an_operator_forbids(options, refused):
    """The document of this attention does not allow float32."""
    attends = (
        "import torch, torch_npu; x = torch.ones(1, 1, 1, 16).npu(); "
        "torch_npu.npu_fused_infer_attention_score(x, x, x, num_heads=1, input_layout='BNSD'); torch.npu.synchronize()"
    )
    ran = run(*options, "--", sys.executable, "-W", "ignore", "-c", attends, TASK_QUEUE_ENABLE="0")
    assert (ran.returncode != 0) == refused, ran.stderr
    assert ("Tensor query not implemented for DT_FLOAT" in ran.stderr) == refused


def test_a_setting_outside_does_not_keep_the_device_from_torch():
    ran = run("--devices", "2", "--", sys.executable, "-c", SAYS_WHAT_IT_HAS, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (ran.returncode, ran.stdout) == (0, "2 4096\n"), ran.stderr


def test_the_tests_of_a_project_pass_and_fail_as_they_would_on_a_device_and_leave_nothing(tmp_path):
    file = tmp_path / "test_project.py"
    file.write_text(TESTS)
    before = set(os.listdir(MEMORY))
    ran = run(
        "--", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(file)
    )
    assert ran.returncode == 1 and "1 failed, 1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert not [name for name in set(os.listdir(MEMORY)) - before if "run-" in name]


@pytest.mark.parametrize(
    "arguments, code, sentence",
    [
        (("--devices", "0", "--", "true"), 2, "'0' is not a whole number of at least 1"),
        (("--capacity", "some", "--", "true"), 2, "'some' is not a whole number of at least 1"),
        (("--", "no-such-program"), 127, "command not found: no-such-program"),
        (("--",), 2, "COMMAND"),
        (("--streams", "-1", "--", "true"), 2, "--streams"),
        (("--streams", "x", "--", "true"), 2, "'x' is not a whole number of at least 0"),
    ],
)
def test_invalid_run_reported_in_one_sentence(arguments, code, sentence):
    ran = run(*arguments)
    assert ran.returncode == code and sentence in ran.stderr and "Traceback" not in ran.stderr
