"""Megatron-core without TransformerEngine computes what transformers does: on one die, and over two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack_2026.checkpoints import make_checkpoints

# Largest difference of logits near 5, in float32.
TOLERANCE = 2e-5
# Patches that DeepSeek-V3 uses without an optimizer.
REACHED = {
    "megatron.core.transformer.moe.moe_utils:router_gating_linear",
    "megatron.core.transformer.multi_latent_attention:HAVE_TE",
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[Path]:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(
    ("dies", "options"),
    [(1, []), (2, []), (2, ["--tensor"]), (2, ["--whole"])],
    ids=["one", "experts", "tensor", "tensor and whole experts"],
)
def test_megatron_core_equals_transformers(checkpoints, dies, options):
    compared = checkpoints if dies == 1 or options == ["--tensor"] else checkpoints[1:]  # no EP without experts
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(dies), "-m", "tests.stack_2026.verl.megatron_program"]
    command += [*options, *map(str, compared)]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    results = json.loads(run.stdout.splitlines()[-1])
    executed, problems = results.pop("executed"), results.pop("problems")
    assert {each.partition("@")[0] for each in executed} >= REACHED and not problems, (executed, problems)
    assert results.keys() == {folder.name for folder in compared}
    for name, found in results.items():
        assert found["logits"] < TOLERANCE and found["gradient"] < 1e-3, (name, found)
        assert found["differ"] == 0, (name, found)
