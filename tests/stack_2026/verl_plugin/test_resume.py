"""Engines resume bit for bit, on any layout, and from checkpoints of the stack 2025; each planted fault is detected."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from post_training.checkpoint.manifest import Manifest
from post_training.checkpoint.training_files import open_training_files
from post_training.models.families import table_for
from post_training.user_files import read_object
from tests.forked import ENGINES_2026
from tests.ranks import run_ranks
from tests.stack_2026.verl_plugin.resume_reference import Reference, write_checkpoint_of_2025
from tests.stack_2026.vllm_ascend.models import write_checkpoint

pytestmark = pytest.mark.slow
SAVED, LAST = 2, 4
TOLERANCE = 1e-6
EXPERTS, WHOLE = {"expert_model": 2, "expert_tensor": 1}, {"expert_model": 1, "expert_tensor": 1}
STATES = ("master", "exp_avg", "exp_avg_sq")


class Runs:
    """The tasks of all tests, run by one group of ranks per layout."""

    program = "tests.stack_2026.verl_plugin.resume_program"
    imported: tuple[str, ...] = ENGINES_2026

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for model in ("qwen3", "deepseek"):
            write_checkpoint(model, folder / model)

    def run(self, world: int, *tasks: dict[str, Any]) -> None:
        (self.folder / "tasks.json").write_text(json.dumps(tasks))
        run_ranks(self.program, world, self.folder, timeout=900, imported=self.imported)

    def task(self, backend: str, name: str, model: str = "deepseek", **more: Any) -> dict[str, Any]:
        task = {"name": name, "backend": backend, "model": str(self.folder / model), "last": LAST, "sizes": EXPERTS}
        return task | more

    def save(self, backend: str, model: str, name: str = "", **more: Any) -> dict[str, Any]:
        """Return a task that updates, saves, and updates again."""
        return self.task(backend, name or backend, model, save_at=SAVED, save=self.step(name or backend), **more)

    def load(self, backend: str, name: str, source: str | Path, **more: Any) -> dict[str, Any]:
        """Return a task that continues from a checkpoint."""
        return self.task(backend, name, load=str(source), first=SAVED + 1, **more)

    def step(self, name: str) -> str:
        return str(self.folder / f"of_{name}" / f"global_step_{SAVED}" / "actor")

    def found(self, name: str, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.folder / f"{name}.{rank}.json").read_text())

    def states(self, name: str, model: str) -> dict[str, torch.Tensor]:
        """Return the full tensors of a task's ranks."""
        shapes = table_for(read_object(self.folder / model / "config.json")).shapes
        sources = open_training_files(self.folder / name, shapes).sources
        found = {}
        for state, source in sources.items():
            for hf_name, tensor in source.tensors.items():
                found[f"{state}/{hf_name}"] = torch.empty(tensor.shape, dtype=tensor.dtype)
                bounds = tuple((0, extent) for extent in tensor.shape)
                source.read_into(hf_name, bounds, found[f"{state}/{hf_name}"])
        return found

    def differing(self, left: str, right: str, model: str) -> list[str]:
        ours, theirs = self.states(left, model), self.states(right, model)
        assert ours.keys() == theirs.keys() and all(f"{state}/lm_head.weight" in ours for state in STATES)
        return [name for name, value in ours.items() if not torch.equal(value, theirs[name])]


def apart(found: dict[str, torch.Tensor], wanted: dict[str, dict[str, torch.Tensor]]) -> float:
    """Return the largest difference of weights to the reference's."""
    return max((found[f"master/{name}"] - value.view(found[f"master/{name}"].shape)).abs().max().item()
               for name, value in wanted["master"].items())  # fmt: skip


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By model: the loss after the save, and the states after the next update."""
    return {}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, references: dict[str, Any]) -> Runs:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # required by Megatron
        made = Runs(tmp_path_factory.mktemp("resume"))
        for model in ("qwen3", "deepseek"):
            reference = Reference(made.folder / model)
            for number in range(1, SAVED + 1):
                reference.update(number)
            states = reference.states()
            write_checkpoint_of_2025(Path(made.step(f"2025_{model}")), states, SAVED)
            loss = reference.loss()
            anew = copy.deepcopy(reference)
            anew.begin(SAVED)
            for number in range(SAVED + 1, LAST + 1):
                anew.update(number)
            reference.update(SAVED + 1)
            references[model] = {"loss": loss, "states": reference.states(), "anew": anew.states()}
        plant(made, states)
        carry_out_all(made)
    return made


def plant(runs: Runs, states: dict[str, dict[str, torch.Tensor]]) -> None:
    """Write checkpoints of the stack 2025 with one fault each."""
    swapped = states | {"exp_avg": states["exp_avg_sq"], "exp_avg_sq": states["exp_avg"].copy()}
    swapped["exp_avg_sq"] = {name: value.abs() for name, value in swapped["exp_avg_sq"].items()}
    write_checkpoint_of_2025(Path(runs.step("swapped")), swapped, SAVED)
    dropped = Path(runs.step("dropped"))
    shutil.copytree(runs.step("2025_deepseek"), dropped)
    manifest = Manifest.read(dropped)
    assert manifest is not None
    (dropped / sorted(manifest.files)[1]).unlink()


def carry_out_all(runs: Runs) -> None:
    of_2025, one_more, weights = runs.step("2025_deepseek"), {"last": SAVED + 1}, {"contents": ["model"]}
    runs.run(
        2,
        runs.save("fsdp2", "qwen3"),
        runs.load("fsdp2", "fsdp2_resumed", runs.step("fsdp2"), model="qwen3"),
        runs.load("fsdp2", "fsdp2_without", runs.step("fsdp2"), model="qwen3", contents=["model", "optimizer"]),
        runs.load("fsdp2", "fsdp2_2025", of_2025, **one_more),
        runs.load("fsdp2", "fsdp2_2025_qwen3", runs.step("2025_qwen3"), model="qwen3", **one_more),
        runs.load("fsdp2", "fsdp2_2025_weights", of_2025, **weights),
        runs.load("fsdp2", "fsdp2_swapped", runs.step("swapped"), **one_more),
        runs.load("fsdp2", "fsdp2_dropped", runs.step("dropped"), **one_more),
        runs.save("megatron", "deepseek"),
        runs.load("megatron", "megatron_resumed", runs.step("megatron")),
        runs.load("megatron", "megatron_2025", of_2025, **one_more),
        runs.load("megatron", "megatron_2025_weights", of_2025, **weights),
        runs.load("megatron", "megatron_weights", runs.step("megatron"), **weights),
    )
    runs.run(
        1,
        runs.load("fsdp2", "fsdp2_on_1", runs.step("fsdp2"), model="qwen3", **one_more),
        runs.load("megatron", "megatron_ep1", runs.step("megatron"), sizes=WHOLE, **one_more),
        runs.save("megatron", "deepseek", "megatron_one", sizes=WHOLE),
    )
    spread = EXPERTS | {"expert_model": 4}
    runs.run(
        4,
        runs.load("fsdp2", "fsdp2_on_4", runs.step("fsdp2"), model="qwen3", **one_more),
        runs.load("megatron", "megatron_ep4", runs.step("megatron"), sizes=spread, **one_more),
        runs.load("megatron", "megatron_one_ep4", runs.step("megatron_one"), sizes=spread, **one_more),
    )
    tensors = {"tensor_model": 2, "expert_model": 1, "expert_tensor": 2}
    runs.run(
        2,
        runs.load("megatron", "megatron_tp2", runs.step("megatron"), sizes=tensors, **one_more),
        runs.load("megatron", "megatron_tp2_2025", of_2025, sizes=tensors, **one_more),
    )


@pytest.mark.parametrize(("backend", "model"), [("fsdp2", "qwen3"), ("megatron", "deepseek")])
def test_resumed_engine_continues_bit_for_bit(runs, backend, model):
    assert runs.differing(f"{backend}.saved", f"{backend}_resumed.loaded", model) == []
    assert runs.differing(f"{backend}.last", f"{backend}_resumed.last", model) == []
    for rank in range(2):
        whole, resumed = runs.found(backend, rank), runs.found(f"{backend}_resumed", rank)
        assert resumed["rates"] == whole["rates"][SAVED:] and len(set(whole["rates"])) == LAST
        assert resumed["random"] == whole["random"]


def test_skipped_random_state_is_noticed(runs):
    assert runs.found("fsdp2_without")["random"] != runs.found("fsdp2")["random"]


@pytest.mark.parametrize(
    ("saved", "model", "layout"),
    [("fsdp2", "qwen3", "on_1"), ("fsdp2", "qwen3", "on_4"), ("megatron_one", "deepseek", "ep4")]
    + [("megatron", "deepseek", layout) for layout in ("ep1", "ep4", "tp2")],
)
def test_other_layout_loads_every_element(runs, saved, model, layout):
    assert runs.differing(f"{saved}.saved", f"{saved}_{layout}.loaded", model) == []
    assert runs.found(f"{saved}_{layout}")["rates"][0] == runs.found(saved)["rates"][SAVED]


@pytest.mark.parametrize(
    ("name", "model"),
    [(name, "deepseek") for name in ("fsdp2_2025", "megatron_2025", "megatron_tp2_2025")]
    + [("fsdp2_2025_qwen3", "qwen3")],
)
def test_checkpoint_of_2025_trains_on_as_plain_torch(runs, references, name, model):
    found, wanted = runs.found(name), references[model]
    assert abs(found["loss"] - wanted["loss"]) < TOLERANCE
    assert apart(runs.states(f"{name}.last", model), wanted["states"]) < TOLERANCE


@pytest.mark.parametrize("name", ["fsdp2_2025_weights", "megatron_2025_weights", "megatron_weights"])
def test_weights_alone_train_on_with_a_new_optimizer(runs, references, name):
    assert apart(runs.states(f"{name}.last", "deepseek"), references["deepseek"]["anew"]) < TOLERANCE


def test_faults_in_a_checkpoint_of_2025_detected(runs, references):
    wanted = references["deepseek"]["states"]
    assert apart(runs.states("fsdp2_swapped.last", "deepseek"), wanted) > 100 * TOLERANCE
    for rank in range(2):
        error = runs.found("fsdp2_dropped", rank)["error"]
        assert error.startswith("CheckpointError") and "rank-00001-of-00003.safetensors: cannot be read" in error
