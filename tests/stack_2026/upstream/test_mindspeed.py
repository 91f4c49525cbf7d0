"""verl's engine with MindSpeed: one step matches transformers with torch's AdamW, and GRPO steps match the rollout.

Its optimizer resumes bit for bit, on the dies and, as in the 256-die job, on the host.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rehearsal.plan import ROOT
from rehearsal.stack_2026.jobs import JOBS
from tests.stack_2026.checkpoints import make_checkpoints
from tests.stack_2026.rehearsals import check_computes_alike, rehearse
from tests.stack_2026.verl_plugin.test_hybrid_optimizer import HALF, MODEL, WITHOUT, on_host, steps
from tests.stack_2026.verl_plugin.test_resume import LAST, SAVED, Runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Placed on PYTHONPATH, in place of the registry's megatron-core.
CHECKOUTS = ("MindSpeed-core_r0.16.0", "Megatron-LM-core_r0.16.0")
# Largest difference, in float32, of logits near 5 and of weights that one step moves by 1e-2.
TOLERANCE = 5e-6
# Largest relative difference of the norm of gradients. The latent attention's weights that all ranks have whole are a
# quarter of its square: counted on two ranks they would raise it by a tenth.
NORM = 1e-4
# CANN's attention operator for packed batches, which the rollout does not call.
PACKED_ATTENTION = "aclnnFlashAttentionVarLenScore"
PERMUTATION = "aclnnMoeTokenPermuteWithRoutingMap"
OPTIMIZERS: dict[str, dict[str, Any]] = {"host": on_host(), "half": on_host(**HALF), "dies": WITHOUT}
KERNELS = ("mindspeed.core.fusions.fused_rms_norm", "mindspeed.te.pytorch.attention.dot_product_attention.backend")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[Path]:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def paths(upstream: Path) -> list[str]:
    """Paths of the checkouts."""
    found = [str(upstream / name) for name in CHECKOUTS]
    assert all(map(os.path.isdir, found)), f"{upstream} lacks one of {CHECKOUTS}"
    return found


def environment_with(paths: list[str], scratch: Path) -> dict[str, str]:
    """Return the environment variables of a program that imports the checkouts."""
    return {
        "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",  # the checkouts are read-only
        "TORCH_EXTENSIONS_DIR": str(scratch / "extensions"),
    }


def operators_of(meters: Path) -> list[set[str]]:
    """Return the operators that each process of a run called on its die."""
    return [set(json.loads(file.read_text())["operators"]) for file in meters.glob("*.json")]


# MindSpeed keeps the tensor parallel size and the kind of attention of a process's first model.
@pytest.mark.parametrize(
    ("dies", "tensor", "fused", "models"),
    [
        (1, 1, False, ("qwen3", "qwen3_moe", "deepseek_v3")),
        (2, 1, False, ("qwen3_moe", "deepseek_v3")),
        (2, 1, True, ("qwen3_moe", "deepseek_v3")),
        (2, 2, True, ("qwen3_moe",)),
        (2, 2, True, ("deepseek_v3",)),
    ],
)
def test_step_with_mindspeed_equals_transformers(checkpoints, dies, tensor, fused, models, paths, tmp_path):
    """Spread experts over all dies; they are whole where tensors are cut, as in the jobs, which permute fused."""
    compared = [folder for folder in checkpoints if folder.name in models]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(dies), "-m", "tests.stack_2026.upstream.mindspeed_program", str(tensor)]
    command.append(json.dumps(fused))
    environment = os.environ | environment_with(paths, tmp_path)
    environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment["NPU_EMULATOR_METERS"] = str(tmp_path / "meters")
    command += map(str, compared)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-3000:]
    results = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
    assert results.pop("mindspeed").startswith(paths[0])
    assert results.keys() == {folder.name for folder in compared}
    assert {PERMUTATION in operators for operators in operators_of(tmp_path / "meters")} == {fused}
    for name, found in results.items():
        assert found["stepped"] and set(KERNELS) <= set(found["layers"]), (name, found)
        assert found["logits"] < TOLERANCE and found["weights"] < TOLERANCE, (name, found)
        assert found["norm"] < NORM, (name, found)
        assert found["moved"] > 1000 * TOLERANCE, (name, found)
        if name == "deepseek_v3":
            assert ("moe_shared_expert_overlap=True is invalid" in found["rejection"]) == (tensor > 1), found


def test_permutation_equals_that_of_megatron_core(paths, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.stack_2026.upstream.permutation_program"]
    environment = os.environ | environment_with(paths, tmp_path)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    facts = json.loads(run.stdout.splitlines()[-1])
    sorted_alike = {"equal": [True] * 5, "alone": True, "interpreted": True, "moved": True}
    assert facts == {**sorted_alike, "permuted": [True] * 4, "rounds": True}


def test_grpo_steps_with_mindspeed_compute_as_the_rollout(paths, tmp_path):
    """Spread experts over two dies. The rehearsal checks after every update that weights arrive bit for bit."""
    arguments = ("--backend", "mindspeed", "--model", "deepseek_v3", "--dies", "2")
    run = rehearse(tmp_path / "run", *arguments, **environment_with(paths, tmp_path))
    check_computes_alike(run, tmp_path / "run")
    packed = [each for each in operators_of(tmp_path / "run" / "meters") if PACKED_ATTENTION in each]
    assert len(packed) == 2, "the ranks that train compute with MindSpeed's attention"


@pytest.mark.parametrize("job", [name for name, job in JOBS.items() if job.backend == "megatron"])
def test_scaled_down_job_computes_as_the_rollout_with_its_own_layers(paths, tmp_path, job):
    run = rehearse(tmp_path / "run", "--job", job, "--backend", "mindspeed", **environment_with(paths, tmp_path))
    check_computes_alike(run, tmp_path / "run")
    fused = [each for each in operators_of(tmp_path / "run" / "meters") if PERMUTATION in each]
    assert len(fused) == JOBS[job].dies, "every die that trains permutes its tokens fused, as the job does"


def test_optimizer_resumes_bit_for_bit(paths, tmp_path, monkeypatch):
    """Use the job's options for the host, half the optimizer on the dies, and all of it.

    There MindSpeed's AdamW counts updates per group.
    """
    for name, value in environment_with(paths, tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(sys, "path", [*paths, *sys.path])
    runs = Runs(tmp_path)
    runs.program = "tests.stack_2026.upstream.mindspeed_resume_program"
    runs.imported = ()  # MindSpeed changes Megatron, so it is imported first
    tasks = []
    for name, options in OPTIMIZERS.items():
        tasks.append(runs.save("megatron", MODEL, name, **options))
        tasks.append(runs.load("megatron", f"{name}_resumed", runs.step(name), **options))
    runs.run(2, *tasks)
    facts = json.loads((tmp_path / "facts.0.json").read_text())
    assert facts["mindspeed"].startswith(paths[0]) and facts["megatron"].startswith(paths[1])
    assert facts["of_the_dies"].startswith("mindspeed.") and not facts["counts_with_weights"]
    for name in OPTIMIZERS:
        assert runs.differing(f"{name}.saved", f"{name}_resumed.loaded", MODEL) == []
        assert runs.differing(f"{name}.last", f"{name}_resumed.last", MODEL) == []
        counts = [steps(runs, f"{name}{when}") for when in (".saved", "_resumed.loaded", "_resumed.last")]
        assert counts == [SAVED, SAVED, LAST]
