"""The workspace that scripts/assemble_workspace.sh makes from checkouts at the cluster's pins, and a job in it.

Needs checkouts: ``bash scripts/test.sh tests/upstream --upstream FOLDER`` (see README.md here). A checkout without git
cannot show its commit, so `overlay check`, which the script runs, decides whether its sources are those of the pins.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripts.guides import BATCH, QUICK_START, QUICK_START_DATA, SMALL, STEPS, Environment, run_of
from tests.upstream.kernels import compile_kernels
from tests.verl_patches.trainer.scaled_job import (
    TRUE,
    TWO_DIES,
    assert_exact,
    assert_left_the_reference,
    ran_graphs,
    run_scaled_job,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # the first test may have to wait for a compiler

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("verl", "vllm", "vllm_ascend", "megatron", "mindspeed", "mindspeed_llm")
PRELUDE = "from verl_patches import prelude_patch"
LAYOUTS = {
    "2 dies": (2, 2, TWO_DIES),
    # TP2 PP2 EP2 DP2, experts over TP x EP, stages of 2 and 1 layers; two rollout instances of 4 dies.
    "8 dies": (8, 3, ()),
}
# The workspace has MindSpeed-LLM, which would otherwise do the training.
OWN_MODEL = "actor_rollout_ref.overlay.mindspeed.engine=off"
# The host-resident optimizer needs bfloat16.
MINDSPEED = (
    "actor_rollout_ref.overlay.mindspeed.engine=on",
    "actor_rollout_ref.overlay.mindspeed.swap_optimizer=false",
)
SWAPPED = ("actor_rollout_ref.overlay.mindspeed.engine=on", "actor_rollout_ref.overlay.precision=bfloat16")
# Operators that only MindSpeed's kernels call; torch_npu has its own gradients.
OF_MINDSPEED = {"aclnnMoeTokenPermuteGrad", "aclnnMoeTokenUnpermuteGrad"}
ADDITIONAL = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config"
MODES = {
    "graph": (),
    "eager": ("+graph=off", f"{ADDITIONAL}.torchair_graph_config.graph_batch_sizes=[]"),
    # The patch series makes this format work if no prompt is cut.
    "graph with the private cache format": (
        f"{ADDITIONAL}.torchair_graph_config.enable_kv_nz=true",
        f"{ADDITIONAL}.ascend_scheduler_config.enable_chunked_prefill=false",
        "actor_rollout_ref.rollout.max_num_batched_tokens=64",
    ),
}


def vllm_sources(upstream: Path, folder: Path) -> Path:
    """Return vLLM's checkout or source distribution, else the installed package without its compiled libraries."""
    for name in ("vllm", "vllm-0.9.1"):
        if (upstream / name / "vllm").is_dir():
            return upstream / name
    installed = Path(importlib.util.find_spec("vllm").origin).parent
    shutil.copytree(installed, folder / "vllm", ignore=shutil.ignore_patterns("*.so*", "__pycache__"))
    return folder


def environment(workspace: Path) -> dict[str, str]:
    own = {"PYTHON": sys.executable, "PYTHONPATH": str(workspace)}
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own


@pytest.fixture(scope="module")
def workspace(upstream, tmp_path_factory) -> Path:
    """Return a copy of this repository with the upstream packages beside its patch folders."""
    folder = tmp_path_factory.mktemp("cluster") / "workspace"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    given = [f"vllm={vllm_sources(upstream, tmp_path_factory.mktemp('vllm'))}"]
    assembled = subprocess.run(
        ["bash", "scripts/assemble_workspace.sh", "--from", str(upstream), *given, "--any-commit"],
        cwd=folder, env=environment(folder), capture_output=True, text=True,
    )  # fmt: skip
    assert assembled.returncode == 0, assembled.stdout[-2000:] + assembled.stderr[-4000:]
    assert "clean" in assembled.stdout.splitlines()
    return folder


@pytest.fixture(scope="module")
def kernels(workspace) -> dict[str, str]:
    """Compile MindSpeed's kernels. Return the variables with which the job finds them."""
    folder = workspace.parent / "extensions"
    compile_kernels({"PYTHONPATH": str(workspace)}, folder)
    return {"TORCH_EXTENSIONS_DIR": str(folder)}


def test_every_package_comes_from_the_workspace(workspace):
    program = (
        "import sys, importlib.util as u; print(*(u.find_spec(n).submodule_search_locations[0] for n in sys.argv[1:]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, *PACKAGES], cwd=workspace, env=environment(workspace),
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert found == [str(workspace / name) for name in PACKAGES]


def test_the_worker_of_the_pin_turns_the_overlay_on_and_the_patch_series_applies(workspace):
    for name in ("__init__.py", "workers/megatron_workers.py"):
        assert PRELUDE in (workspace / "verl" / name).read_text()
    changed = [line.removeprefix("+++ b/") for line in series_of(workspace) if line.startswith("+++ b/")]
    assert changed and all((workspace / name).is_file() for name in changed)


def series_of(workspace: Path) -> list[str]:
    """Return all lines of the patches in vllm_ascend_patches/series."""
    folder = workspace / "vllm_ascend_patches"
    names = [line.strip() for line in (folder / "series").read_text().splitlines()]
    return [
        line for name in names if name and not name.startswith("#") for line in (folder / name).read_text().splitlines()
    ]


def test_a_checkout_that_does_not_fit_changes_nothing(upstream, workspace, tmp_path):
    spoilt = shutil.copytree(upstream / "verl", tmp_path / "verl", ignore=shutil.ignore_patterns(".git"))
    registry = spoilt / "verl" / "models" / "mcore" / "registry.py"
    registry.write_text(registry.read_text().replace("def init_mcore_model(", "def init_another_model("))
    before = (workspace / "verl" / "models" / "mcore" / "registry.py").read_bytes()
    rejected = subprocess.run(
        ["bash", "scripts/assemble_workspace.sh", "--from", str(upstream), f"vllm={workspace}", f"verl={spoilt}",
         "--any-commit"],
        cwd=workspace, env=environment(workspace), capture_output=True, text=True,
    )  # fmt: skip
    assert rejected.returncode != 0 and "do not apply to these sources" in rejected.stdout + rejected.stderr
    assert (workspace / "verl" / "models" / "mcore" / "registry.py").read_bytes() == before


@pytest.fixture
def built_in_place(workspace) -> Iterator[None]:
    """Put vLLM-Ascend's compiled modules beside its sources, as the image does; FSDP's rollout needs them to sleep."""
    installed = Path(importlib.util.find_spec("vllm_ascend").origin).parent
    copies = [Path(shutil.copy(file, workspace / "vllm_ascend")) for file in installed.glob("*.so")]
    yield
    for copy in copies:
        copy.unlink()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("built_in_place")
def test_quick_start_trains_in_the_workspace(workspace, tmp_path):
    """verl's own command runs on FSDP at the cluster's commit; a line in verl's package activates the patches."""
    user = Environment(tmp_path)
    (tmp_path / "model").mkdir()
    user.fill_hub(tmp_path / "model")
    user.follow(QUICK_START_DATA, cwd=workspace)
    small = SMALL | {"data.train_batch_size": BATCH, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 10}
    user.follow(QUICK_START, *(f"{key}={value}" for key, value in small.items()), cwd=workspace)
    _, steps = run_of(workspace, "verl_grpo_example_gsm8k", "qwen2_7b_function_rm")
    assert len(steps) == STEPS and all(step["actor/grad_norm"] > 0 for step in steps)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["2 dies", pytest.param("8 dies", marks=pytest.mark.exhaustive)])
def test_the_job_trains_with_exact_weights(workspace, mla_inputs, tmp_path, layout, mode):
    dies, steps, sizes = LAYOUTS[layout]
    overrides = (OWN_MODEL, *sizes, *MODES[mode])
    metrics = run_scaled_job(
        TRUE, tmp_path, *mla_inputs, *overrides, dies=dies, root=workspace, NPU_EMULATOR_METERS=str(tmp_path / "meters")
    )
    shown = ("reshard/weights_exact", "training/rollout_logprob_diff_max", "actor/kl_loss", "actor/grad_norm")
    print(*({name: step[name] for name in shown} for step in metrics), sep="\n")
    assert_exact(metrics, steps, in_float32=mode == "eager")
    assert_left_the_reference(metrics)
    report = json.loads((tmp_path / "overlay.json").read_text())
    assert all(report["effective"].values()) and not report["drift"] and not report["problems"]
    assert ran_graphs(tmp_path) == (mode != "eager")
    assert not operators_called(tmp_path / "meters") & OF_MINDSPEED


def operators_called(folder: Path) -> set[str]:
    """Return the operators that any process of a run called, from the meters in `folder`."""
    counted = [json.loads(file.read_text())["operators"] for file in folder.glob("*.json")]
    assert counted, f"no process has left meters in {folder}"
    return {name for operators in counted for name, numbers in operators.items() if numbers["calls"]}


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("layout", ["2 dies", pytest.param("8 dies", marks=pytest.mark.exhaustive)])
def test_the_job_trains_through_mindspeed_with_exact_weights(workspace, kernels, mla_inputs, tmp_path, layout, mode):
    dies, steps, sizes = LAYOUTS[layout]
    metrics = run_scaled_job(
        TRUE, tmp_path, *mla_inputs, *MINDSPEED, *sizes, *MODES[mode], dies=dies, root=workspace,
        NPU_EMULATOR_METERS=str(tmp_path / "meters"), **kernels,
    )  # fmt: skip
    print(*metrics, sep="\n")
    assert_exact(metrics, steps, in_float32=mode == "eager")
    # Graphs are rehearsed in bfloat16, in which MindSpeed's rounding of a sum depends on what is packed beside it.
    assert_left_the_reference(metrics, same=1e-6 if mode == "eager" else 3e-5)
    report = json.loads((tmp_path / "overlay.json").read_text())
    assert all(report["effective"].values()) and not report["drift"] and not report["problems"]
    assert ran_graphs(tmp_path) == (mode != "eager")
    assert operators_called(tmp_path / "meters") >= OF_MINDSPEED


@pytest.mark.parametrize("layout", ["2 dies", pytest.param("8 dies", marks=pytest.mark.exhaustive)])
def test_the_optimizer_that_lives_on_the_host_keeps_weights_exact(workspace, kernels, mla_inputs, tmp_path, layout):
    dies, steps, sizes = LAYOUTS[layout]
    metrics = run_scaled_job(
        TRUE, tmp_path, *mla_inputs, *SWAPPED, *sizes, *MODES["eager"], dies=dies, root=workspace,
        NPU_EMULATOR_METERS=str(tmp_path / "meters"), **kernels,
    )  # fmt: skip
    print(*metrics, sep="\n")
    assert [step["reshard/weights_exact"] for step in metrics] == [1] * steps
    assert all(step["overlay/patches_ineffective"] == 0 for step in metrics)
    assert all(step["actor/kl_loss"] > 1e-4 for step in metrics[1:])
    assert "aclnnApplyAdamWV2" in operators_called(tmp_path / "meters")
