"""One step with MindSpeed in verl's engine is transformers' with torch's AdamW, with experts on one die and on two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rehearsal.plan import ROOT
from tests.stack_2026.checkpoints import make_checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# On PYTHONPATH, in the place of the registry's megatron-core.
CHECKOUTS = ("MindSpeed-core_r0.16.0", "Megatron-LM-core_r0.16.0")
# Of logits near 5 and of weights that one step moves by 1e-2, in float32.
TOLERANCE = 5e-6
KERNELS = ("mindspeed.core.fusions.fused_rms_norm", "mindspeed.te.pytorch.attention.dot_product_attention.backend")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[Path]:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("dies", [1, 2])
def test_step_with_mindspeed_equals_transformers(checkpoints, dies, upstream, tmp_path):
    paths = [str(upstream / name) for name in CHECKOUTS]
    assert all(map(os.path.isdir, paths)), f"{upstream} lacks one of {CHECKOUTS}"
    compared = checkpoints if dies == 1 else checkpoints[1:]  # without experts nothing is spread over dies
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(dies), "-m", "tests.stack_2026.upstream.mindspeed_program"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",  # the checkouts are read only
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "TRANSFORMERS_VERBOSITY": "error",  # MindSpeed looks at every module, and transformers warns of each
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command += map(str, compared)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-3000:]
    results = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
    assert results.pop("mindspeed").startswith(paths[0])
    assert results.keys() == {folder.name for folder in compared}
    for name, found in results.items():
        assert found["stepped"] and set(KERNELS) <= set(found["layers"]), (name, found)
        assert found["logits"] < TOLERANCE and found["weights"] < TOLERANCE, (name, found)
        assert found["moved"] > 1000 * TOLERANCE, (name, found)
