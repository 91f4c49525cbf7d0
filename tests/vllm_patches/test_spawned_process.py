"""Processes that vLLM spawns for engines and workers have the patches and settings."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_process_that_vllm_spawns_is_patched_and_one_that_python_spawns_is_not(tmp_path):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    file = tmp_path / "found.json"
    environment = os.environ | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "tests.vllm_patches.spawned_program", str(file)]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    by_vllm, by_python = json.loads(file.read_text())
    assert by_vllm["overlay"] and by_vllm["precision"] == "float32" and len(by_vllm["applied"]) > 5
    assert by_python == {"overlay": False}
