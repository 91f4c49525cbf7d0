"""Checkpoints that verl's engines save are exported with the engines' live weights, bit for bit.

The referees are the tensors in the engines' memory, transformers, and verl's own merger.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from post_training.checkpoint.complete_files import write_complete
from post_training.layouts.published_names import published_name
from scripts import verify_ckpt
from tests.post_training.checkpoint.test_training_export import export
from tests.stack_2026.verl_plugin.resume_reference import IDS, Reference, loss_of
from tests.stack_2026.verl_plugin.test_resume import SAVED, Runs
from tests.stack_2026.vllm_ascend.models import write_checkpoint

pytestmark = pytest.mark.slow
ENGINES = {"fsdp2 on 2": "qwen3", "fsdp2 experts on 2": "qwen3moe", "megatron on 2": "deepseek", "megatron": "qwen3"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Engines that updated and saved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # required by Megatron
        made = Runs(tmp_path_factory.mktemp("export"))
        write_checkpoint("qwen3moe", made.folder / "qwen3moe")
        ends = {"last": SAVED}
        made.run(
            2,
            made.save("fsdp2", "qwen3", "fsdp2 on 2", **ends),
            made.save("fsdp2", "qwen3moe", "fsdp2 experts on 2", **ends),
            made.save("megatron", "deepseek", "megatron on 2", **ends),
        )
        # Megatron-core's groups are made once in a process.
        made.run(2, made.save("megatron", "qwen3", "megatron", sizes={"tensor_model": 2}, **ends))
    for name in ENGINES:
        write_complete(step_of(made, name))
    return made


def step_of(runs: Runs, name: str) -> Path:
    return Path(runs.step(name)).parent


def exported(runs: Runs, name: str, output: Path) -> dict[str, torch.Tensor]:
    """Export a run's checkpoint and return the tensors in its files."""
    assert export(step_of(runs, name), output, "--hf-dir", runs.folder / ENGINES[name]) == 0
    return {tensor: value for file in output.glob("*.safetensors") for tensor, value in load_file(file).items()}


def live(runs: Runs, name: str) -> dict[str, torch.Tensor]:
    """Return the weights that the engine's ranks held when they saved, by HF name."""
    states = runs.states(f"{name}.saved", ENGINES[name])
    return {key.partition("/")[2]: value for key, value in states.items() if key.startswith(("master/", "weight/"))}


@pytest.mark.parametrize("name", ENGINES)
def test_export_has_the_live_weights(runs, tmp_path, name):
    found, wanted = exported(runs, name, tmp_path / "out"), live(runs, name)
    assert found.keys() == wanted.keys() and len(found) > 10
    assert [tensor for tensor, value in wanted.items() if not torch.equal(found[tensor].view(value.shape), value)] == []
    # The control: the updates moved every trained weight away from the model that they began with.
    began = load_file(runs.folder / ENGINES[name] / "model.safetensors")
    same = {tensor for tensor, value in began.items() if torch.equal(found[tensor], value)}
    assert all(tensor.endswith("e_score_correction_bias") for tensor in same)


@pytest.mark.parametrize("name", ENGINES)
def test_transformers_computes_what_plain_torch_trained(runs, tmp_path, name):
    exported(runs, name, tmp_path / "out")
    model, said = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"] and model.dtype == torch.float32
    with torch.no_grad():
        loss = loss_of(model(input_ids=IDS).logits)
    reference = Reference(runs.folder / ENGINES[name])
    began = reference.loss()
    for number in range(1, SAVED + 1):
        reference.update(number)
    assert loss == pytest.approx(reference.loss(), abs=1e-5) and abs(loss - began) > 1e-3


@pytest.mark.parametrize("name", ["fsdp2 on 2", "fsdp2 experts on 2"])
def test_verls_merger_makes_the_same_model(runs, tmp_path, name):
    """verl's merger writes bfloat16."""
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads((runs.folder / ENGINES[name] / "config.json").read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    (base / "config.json").write_text(json.dumps(config | {key: "bfloat16"}))
    step = step_of(runs, name)
    assert export(step, tmp_path / "out", "--hf-dir", base) == 0
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(step / "actor"), "--target_dir", str(tmp_path / "merged")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    ours, theirs = (weights(tmp_path / folder) for folder in ("out", "merged"))
    assert ours.keys() == theirs.keys()
    assert [tensor for tensor, value in ours.items() if not torch.equal(value, theirs[tensor])] == []


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a folder as transformers loads them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    return {published_name(name): value for name, value in model.state_dict().items()}


def test_flipped_weight_in_a_ranks_file_is_found(runs, tmp_path, capsys):
    name = "fsdp2 on 2"
    exported(runs, name, tmp_path / "out")
    step = step_of(runs, name)
    arguments = [str(step), str(tmp_path / "out"), "--workers", "1"]
    assert verify_ckpt.main(arguments) == 0
    norm = live(runs, name)["model.norm.weight"]
    file = step / "actor" / "model_world_size_2_rank_1.pt"
    right = file.read_bytes()
    wrong: Any = bytearray(right)
    wrong[right.index(norm[len(norm) // 2 :].numpy().tobytes()) + 1] ^= 1
    file.write_bytes(wrong)
    try:
        assert verify_ckpt.main(arguments) == 1
    finally:
        file.write_bytes(right)
    assert f"different: model.norm.weight: [{len(norm) // 2}] is" in capsys.readouterr().out


def test_lost_rank_is_named(runs, tmp_path, capsys):
    step = step_of(runs, "fsdp2 on 2")
    file = step / "actor" / "model_world_size_2_rank_1.pt"
    file.rename(tmp_path / file.name)
    try:
        assert export(step, tmp_path / "out", "--hf-dir", runs.folder / "qwen3") == 2
    finally:
        (tmp_path / file.name).rename(file)
    assert f"is not complete: actor/{file.name} is missing" in capsys.readouterr().err
