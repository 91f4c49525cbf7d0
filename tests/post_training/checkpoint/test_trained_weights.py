"""Checkpoints of verl 0.9.1's managers are exported bit for bit, and what is not whole or not theirs is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from post_training.checkpoint.complete_files import write_complete
from post_training.models.families import table_for
from scripts import verify_ckpt
from tests.post_training.checkpoint.test_training_export import FAMILIES, base, export, trained
from tests.post_training.checkpoint.verl_files import save_fsdp2, save_megatron

SAVE = {
    "one rank": lambda model, run: save_fsdp2(model, run, ranks=1),
    "three ranks": lambda model, run: save_fsdp2(model, run, ranks=3),
    "more ranks than experts": lambda model, run: save_fsdp2(model, run, ranks=5),
    "replicas": lambda model, run: save_fsdp2(model, run, ranks=2, replicas=2),
    "megatron": save_megatron,
}


@pytest.mark.parametrize("saved", SAVE)
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_computes_the_same_logits(name, saved, tmp_path):
    model = trained(name)
    step = SAVE[saved](model, tmp_path)
    assert export(step, tmp_path / "out", "--hf-dir", base(tmp_path / "base", model, "float32")) == 0
    found, said = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"] and found.dtype == torch.float32
    tokens = torch.arange(2, 42).view(2, 20)
    with torch.no_grad():
        assert torch.equal(found.eval()(tokens).logits, model(tokens).logits)
        # The control: another value of one element.
        next(p for n, p in found.named_parameters() if "down_proj" in n).view(-1)[0] += 1
        assert not torch.equal(found(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("saved", ["three ranks", "megatron"])
def test_float32_is_rounded_once_and_routers_biases_are_not(saved, tmp_path):
    model = trained("deepseek_v3")
    step = SAVE[saved](model, tmp_path)
    assert export(step / "actor", tmp_path / "out", "--hf-dir", base(tmp_path / "base", model, "bfloat16")) == 0
    files = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    found = {tensor: value for file in files for tensor, value in file.items()}
    other = shutil.copytree(tmp_path / "base", tmp_path / "whole")
    (other / "config.json").write_text((other / "config.json").read_text().replace('"bfloat16"', '"float32"'))
    assert export(step, tmp_path / "float32", "--hf-dir", other) == 0
    whole = [load_file(file) for file in (tmp_path / "float32").glob("*.safetensors")]
    weights = {tensor: value for file in whole for tensor, value in file.items()}
    assert found.keys() == table_for(model.config).shapes.keys() == weights.keys()
    for tensor, value in weights.items():
        expected = value if tensor.endswith("correction_bias") else value.to(torch.bfloat16)
        assert found[tensor].dtype == expected.dtype and torch.equal(found[tensor], expected), tensor


def test_weights_that_were_saved_in_bfloat16_stay_so(tmp_path):
    """The type of the model that Megatron trains, whatever the published one is."""
    model = trained("qwen3").to(torch.bfloat16)
    step = save_megatron(model, tmp_path)
    assert export(step, tmp_path / "out", "--hf-dir", base(tmp_path / "base", model, "float32")) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", torch_dtype="auto")
    assert found.dtype == torch.bfloat16
    weights = model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in found.state_dict().items())


def test_without_a_run_the_model_described_in_the_checkpoint_is_taken(tmp_path):
    model = trained("qwen3")
    for saved in ("one rank", "megatron"):
        run = tmp_path / saved
        step, out = SAVE[saved](model, run), tmp_path / f"out of {saved}"
        (run / "config.yaml").write_text("actor_rollout_ref: {model: {path: Qwen/Qwen3-0.6B}}")
        assert export(step, out) == 0 and (out / "tokenizer.json").read_text() == "{}"
        # A model that is there comes first, also where only Hydra wrote the configuration.
        (run / "config.yaml").unlink()
        (run / "hydra" / ".hydra").mkdir(parents=True)
        path = base(run / "base", model, "bfloat16")
        (run / "hydra" / ".hydra" / "config.yaml").write_text(f"actor_rollout_ref: {{model: {{path: '{path}'}}}}")
        assert export(step, run / "out") == 0
        assert json.loads((run / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("saved", ["three ranks", "megatron"])
def test_flipped_weight_differs_from_its_export(saved, tmp_path, capsys):
    model = trained("qwen3_moe")
    torch.nn.init.uniform_(model.model.norm.weight)
    step, out = SAVE[saved](model, tmp_path), tmp_path / "out"
    assert export(step, out, "--hf-dir", base(tmp_path / "base", model, "float32")) == 0
    line = [str(step), str(out), "--workers", "1"]
    assert verify_ckpt.main(line) == 0
    assert f"equal: {len(table_for(model.config).shapes)} tensors" in capsys.readouterr().out
    other = SAVE[saved](model, tmp_path / "other")
    assert verify_ckpt.main([str(step), str(other)]) == 0 and "equal" in capsys.readouterr().out
    pattern = (
        "actor/model_world_size_3_rank_1.pt" if saved == "three ranks" else "actor/model/huggingface/*.safetensors"
    )
    file = sorted(step.glob(pattern))[0]
    file.write_bytes(flipped(file, model.model.norm.weight if saved == "three ranks" else None))
    assert verify_ckpt.main(line) == 1
    said = capsys.readouterr().out
    assert "different: " in said and ("model.norm.weight: [16] is" in said or saved == "megatron")
    assert verify_ckpt.main([str(step), str(other)]) == 1


def flipped(file: Path, weight: torch.Tensor | None) -> bytes:
    """Return the file's content with one bit changed: of the second third of a weight, or of the last tensor."""
    content = bytearray(file.read_bytes())
    place = len(content) - 1 if weight is None else content.index(weight.detach()[16:32].numpy().tobytes()) + 2
    content[place] ^= 0x10
    return bytes(content)


def _without(name: str, complete: bool = False):
    """Remove a file; a checkpoint that is complete was saved without it."""

    def change(step: Path, model: Path) -> None:
        (step / name).unlink()
        if complete:
            write_complete(step)

    return change


def _cut(step: Path, model: Path) -> None:
    file = step / "actor" / "model_world_size_2_rank_0.pt"
    file.write_bytes(file.read_bytes()[:-1])


def _adapters(step: Path, model: Path) -> None:
    (step / "actor" / "lora_train_meta.json").write_text("{}")
    write_complete(step)


def _ranks(step: Path, model: Path) -> None:
    (step / "actor" / "fsdp_config.json").write_text('{"world_size": null}')
    write_complete(step)


def _set(**values):
    def change(step: Path, model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _lacking_rows(step: Path, model: Path) -> None:
    """Save the second rank's part of a model of another size."""
    other = step.parents[2] / "other"
    narrow = trained("qwen3_moe")
    narrow.model.norm.weight = torch.nn.Parameter(torch.ones(46))
    file = "model_world_size_2_rank_1.pt"
    shutil.copy(save_fsdp2(narrow, other, ranks=2) / "actor" / file, step / "actor" / file)
    write_complete(step)


def _without_shard(step: Path, model: Path) -> None:
    sorted((step / "actor" / "model" / "huggingface").glob("*.safetensors"))[0].unlink()


SECOND = "actor/model_world_size_2_rank_1.pt"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without("complete.json"), "is not complete: it has no complete.json, which is written last"),
        (_without(SECOND), f"global_step_7 is not complete: {SECOND} is missing"),
        (_without(SECOND, complete=True), "actor is not complete: model_world_size_2_rank_1.pt is missing"),
        (_cut, "actor/model_world_size_2_rank_0.pt has"),
        (_adapters, "has LoRA adapters (lora_train_meta.json), which are not exported"),
        (_ranks, "world_size is None, which is not a number of ranks"),
        (_lacking_rows, "model.norm.weight has shape (23,), which is not a part of (46,)"),
        (_set(vocab_size=96), "is not a tensor of this model"),
        (_set(num_hidden_layers=4), "no file has any part of model.layers.3."),
        (_set(torch_dtype="int8"), "torch_dtype='int8' is invalid. Set it to the type to write, one of"),
    ],
)
def test_checkpoint_that_is_not_whole_or_another_models_is_named(change, says, tmp_path, capsys):
    model = trained("qwen3_moe")
    step, model_folder = save_fsdp2(model, tmp_path / "run", ranks=2), base(tmp_path / "base", model, "float32")
    change(step, model_folder)
    assert export(step, tmp_path / "out", "--hf-dir", model_folder) == 2
    message = capsys.readouterr().err.split("error: ")[-1]
    assert says in message and message.count("\n") == 1
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without("actor/ckpt_contents.json"), "is not complete: actor/ckpt_contents.json is missing"),
        (_without_shard, "is not complete: actor/model/huggingface/model-00001-of-"),
        (_set(num_hidden_layers=4), "is missing (11 of 47 are)"),
    ],
)
def test_files_of_megatron_that_are_not_whole_are_named(change, says, tmp_path, capsys):
    model = trained("qwen3")
    step, model_folder = save_megatron(model, tmp_path / "run"), base(tmp_path / "base", model, "float32")
    change(step, model_folder)
    assert export(step, tmp_path / "out", "--hf-dir", model_folder) == 2
    message = capsys.readouterr().err.split("error: ")[-1]
    assert says in message and message.count("\n") == 1


def test_model_saved_in_megatrons_own_form_is_named_with_the_key(tmp_path, capsys):
    model = trained("qwen3")
    step = save_megatron(model, tmp_path / "run", "megatron_dist_checkpoint")
    assert export(step, tmp_path / "out", "--hf-dir", base(tmp_path / "base", model, "float32")) == 2
    assert "the model as megatron_dist_checkpoint, which is not exported" in capsys.readouterr().err
