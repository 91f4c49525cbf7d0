"""An optimizer on the host (`optimizer_cpu_offload`) resumes bit for bit; each planted fault is detected."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from post_training.checkpoint.filling import steps_of
from post_training.checkpoint.training_files import STEPS, open_training_files
from post_training.models.families import table_for
from post_training.user_files import read_object
from tests.forked import PYTORCH
from tests.ranks import run_ranks
from tests.stack_2026.verl_plugin.resume_reference import Reference, write_checkpoint_of_2025
from tests.stack_2026.verl_plugin.test_resume import EXPERTS, LAST, SAVED, STATES, WHOLE, Runs
from verl_plugin.jobs.composition import compose_job

pytestmark = pytest.mark.slow
JOB = "deepseek_v3_671b_256_dies"
MODEL = "deepseek"
FAULTS = (STEPS, "exp_avg", "exp_avg_sq", "param")
OPTIONS = dict(compose_job(JOB).actor_rollout_ref.actor.optim.override_optimizer_config)
"""Optimizer options of the 256-die job."""
WITHOUT: dict[str, Any] = {"optimizer": {}, "leaves": True}
"""The same training in bfloat16, with the whole optimizer on the dies."""
HALF = {"optimizer_offload_fraction": 0.5}
ON_DIES = {"use_precision_aware_optimizer": False}
"""Float32 weights are on the dies too, as copies of the host's."""
LOADED, UPDATES = 3, 2
"""Numbers of updates in `hybrid_program`: those that it loads, and those that it makes."""
TENSORS = {"tensor_model": 2, "expert_model": 1, "expert_tensor": 2}


def on_host(**other: Any) -> dict[str, Any]:
    """Return a task's options: the job's, with parameters and state offloaded after each pass."""
    return {"optimizer": OPTIONS | other, "leaves": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # required by Megatron
        made = Runs(tmp_path_factory.mktemp("hybrid"))
        reference = Reference(made.folder / MODEL)
        for number in range(1, SAVED + 1):
            reference.update(number)
        write_checkpoint_of_2025(Path(made.step("2025")), reference.states(), SAVED)
        carry_out_all(made)
    return made


def carry_out_all(runs: Runs) -> None:
    job, loaded = runs.step("host"), {"last": SAVED}
    runs.run(
        2,
        runs.save("megatron", MODEL, "host", **on_host()),
        runs.load("megatron", "host_resumed", job, **on_host()),
        runs.save("megatron", MODEL, "half", **on_host(**HALF)),
        runs.load("megatron", "half_resumed", runs.step("half"), **on_host(**HALF)),
        runs.load("megatron", "host_half", job, **loaded, **on_host(**HALF)),
        runs.save("megatron", MODEL, "weights", **on_host(**ON_DIES)),
        runs.load("megatron", "weights_resumed", runs.step("weights"), **on_host(**ON_DIES)),
        runs.save("megatron", MODEL, "dies", **WITHOUT),
        runs.load("megatron", "dies_host", runs.step("dies"), **on_host()),
        runs.load("megatron", "host_dies", job, **WITHOUT),
        runs.load("megatron", "host_2025", runs.step("2025"), **loaded, **on_host()),
        *(
            runs.load("megatron", f"{saved}_alone", runs.step(saved), contents=["model"], **loaded, **options)
            for saved, options in (("host", on_host()), ("weights", on_host(**ON_DIES)), ("dies", WITHOUT))
        ),
        *(runs.load("megatron", f"host_{fault}", job, fault=fault, **on_host()) for fault in FAULTS),
    )
    runs.run(1, runs.load("megatron", "host_ep1", job, sizes=WHOLE, **loaded, **on_host()))
    runs.run(4, runs.load("megatron", "host_ep4", job, sizes=EXPERTS | {"expert_model": 4}, **loaded, **on_host()))
    runs.run(2, runs.load("megatron", "host_tp2", job, sizes=TENSORS, **loaded, **on_host()))


def steps(runs: Runs, name: str) -> int:
    """Return the number of updates of the weights on all ranks.

    Raises:
        CheckpointError: The weights have different numbers of updates.
    """
    shapes = table_for(read_object(runs.folder / MODEL / "config.json")).shapes
    return steps_of(open_training_files(runs.folder / name, shapes))


@pytest.mark.parametrize("saved", ["host", "half", "weights"])
def test_resumed_engine_continues_bit_for_bit(runs, saved):
    assert OPTIONS["optimizer_cpu_offload"] and OPTIONS["use_precision_aware_optimizer"]
    assert runs.differing(f"{saved}.saved", f"{saved}_resumed.loaded", MODEL) == []
    assert runs.differing(f"{saved}.last", f"{saved}_resumed.last", MODEL) == []
    assert runs.differing(f"{saved}.saved", f"{saved}.last", MODEL) != []
    assert [steps(runs, f"{saved}{when}") for when in (".saved", "_resumed.loaded", "_resumed.last")] == [
        SAVED,
        SAVED,
        LAST,
    ]
    for rank in range(2):
        whole, resumed = runs.found(saved, rank), runs.found(f"{saved}_resumed", rank)
        assert resumed["rates"] == whole["rates"][SAVED:] and resumed["random"] == whole["random"]


@pytest.mark.parametrize("layout", ["ep1", "ep4", "tp2", "half"])
def test_other_layout_loads_every_element(runs, layout):
    assert runs.differing("host.saved", f"host_{layout}.loaded", MODEL) == []
    assert steps(runs, f"host_{layout}.loaded") == SAVED


@pytest.mark.parametrize(("saved", "loaded"), [("dies", "dies_host"), ("host", "host_dies")])
def test_optimizer_moves_between_host_and_dies(runs, saved, loaded):
    assert runs.differing(f"{saved}.saved", f"{loaded}.loaded", MODEL) == []
    assert steps(runs, f"{loaded}.loaded") == SAVED and steps(runs, f"{loaded}.last") == LAST


@pytest.mark.parametrize("saved", ["host", "weights", "dies"])
def test_float32_copies_follow_weights_that_are_loaded_alone(runs, saved):
    wanted, found = (runs.states(name, MODEL) for name in (f"{saved}.saved", f"{saved}_alone.loaded"))
    masters = [name for name in found if name.startswith("master/")]
    assert masters and {name.split("/")[0] for name in found} <= {"master", "weight"}, "it has averages"
    assert all(torch.equal(found[name], wanted[name].bfloat16().float()) for name in masters)


def test_checkpoint_of_2025_is_loaded_whole(runs):
    shutil.copytree(runs.step("2025"), runs.folder / "of_2025.files")
    saved, loaded = (runs.states(name, MODEL) for name in ("of_2025.files", "host_2025.loaded"))
    compared = [name for name in saved if name.startswith(STATES)]
    assert compared and all(torch.equal(saved[name], loaded[name]) for name in compared)
    assert steps(runs, "host_2025.loaded") == SAVED


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_loading_changes_states_and_weights(runs, fault):
    """Check that the state that was not loaded differs, and that weights differ after the next updates."""
    name = f"host_{fault}"
    if fault == STEPS:
        assert steps(runs, f"{name}.loaded") != SAVED
    else:
        state = "master" if fault == "param" else fault
        assert {each.split("/")[0] for each in runs.differing("host.saved", f"{name}.loaded", MODEL)} == {state}
    assert any(each.startswith("master/") for each in runs.differing("host.last", f"{name}.last", MODEL))


def test_updates_counted_in_a_group_go_on(tmp_path):
    run_ranks("tests.stack_2026.verl_plugin.hybrid_program", 1, tmp_path, timeout=300, imported=PYTORCH)
    found = json.loads((tmp_path / "0.json").read_text())
    assert found == {"counts": [LOADED + UPDATES] * 2, "places": [["cpu"], ["npu"]]}


def test_host_updates_as_the_dies_do(runs):
    """Compare all updates: bit for bit between two runs on the host, and within rounding with the dies' kernels."""
    host, weights, dies = (runs.states(f"{name}.last", MODEL) for name in ("host", "weights", "dies"))
    assert all(torch.equal(host[name], weights[name]) for name in host)
    assert max((host[name] - dies[name]).abs().max().item() for name in host) < 1e-6
