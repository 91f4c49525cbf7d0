"""A process asks npu-smi only once whether the processes of a die can share memory."""

import json
import subprocess
import sys

from verl_plugin.alltoallv.settings import LIBRARY

ASKS = """
import importlib, json, subprocess, sys

importlib.import_module(sys.argv[1])
from verl.utils.device import is_support_ipc

start, failing = subprocess.run, int(sys.argv[2])
answers, started = [], []

def run(command, *arguments, **options):
    started.append(command[0])
    if len(started) <= failing:
        raise subprocess.CalledProcessError(1, command)
    return start(command, *arguments, **options)

subprocess.run = run
for _ in range(3):
    try:
        answers.append(is_support_ipc())
    except RuntimeError:
        answers.append("error")
print(json.dumps([answers, started]))
"""


def ask_three_times(module: str, failing: int = 0) -> tuple[list[bool | str], list[str]]:
    """Ask in a process that has imported `module`; return the answers, and the commands that were started for them.

    The first `failing` commands fail.
    """
    command = [sys.executable, "-W", "ignore", "-c", ASKS, module, str(failing)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    answers, started = json.loads(run.stdout.splitlines()[-1])
    return answers, started


def test_verl_starts_npu_smi_for_each_answer():
    assert ask_three_times("verl") == ([True] * 3, ["npu-smi"] * 3)


def test_engines_have_npu_smi_started_once():
    assert ask_three_times(LIBRARY) == ([True] * 3, ["npu-smi"])


def test_error_is_asked_again():
    assert ask_three_times(LIBRARY, failing=1) == (["error", True, True], ["npu-smi"] * 2)
