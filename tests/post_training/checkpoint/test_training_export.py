"""An exported training checkpoint has the weights and the logits of transformers' model."""

import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from post_training.checkpoint.command_line import run_tool
from post_training.checkpoint.manifest import Manifest
from post_training.checkpoint.training_files import (
    MASTER,
    WEIGHT,
    entry_name,
    file_name,
    is_first_peer,
    owned_shards,
    write_file,
)
from post_training.layouts.layout import TrainPlacement
from post_training.models.families import table_for
from scripts import export_hf, verify_ckpt
from tests.post_training.checkpoint.synthetic import small_config

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
FAMILIES = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2_tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False),
    "deepseek_v3": small_config(num_hidden_layers=3, num_nextn_predict_layers=1),
}
PLACEMENT = TrainPlacement(2, 2, 2, 2, (1, 2))


def trained(name):
    """Make a float32 model of transformers, as the trained one."""
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(FAMILIES[name], torch_dtype=torch.float32).eval()


def saved(model, folder, placement=PLACEMENT):
    """Write the checkpoint of a step with these weights as the placement's ranks do, and return its folder."""
    table, weights = table_for(model.config), model.state_dict()
    manifest = Manifest({}, complete=True)
    for rank in range(placement.world_size):
        entries = {}
        for shard in owned_shards(table, placement, rank):
            if is_first_peer(placement, rank, shard):
                state = WEIGHT if shard.hf_name.endswith("correction_bias") else MASTER
                part = weights[shard.hf_name][tuple(slice(*interval) for interval in shard.bounds)]
                entries[entry_name(state, shard.hf_name, shard.bounds)] = part
        name = file_name(rank, placement.world_size)
        (folder / "global_step_7" / "actor").mkdir(parents=True, exist_ok=True)
        manifest.files[name] = write_file(folder / "global_step_7" / "actor" / name, entries, {"steps": "7"})
    manifest.write(folder / "global_step_7" / "actor")
    Manifest({}, complete=True).write(folder / "global_step_7")
    return folder / "global_step_7"


def base(folder, model, dtype):
    """Write the model folder that the training started from; only its configuration and tokenizer matter."""
    folder.mkdir()
    config = json.loads(model.config.to_json_string(use_diff=False))
    architecture = type(model).__name__
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype, "architectures": [architecture]}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def export(*arguments):
    return run_tool(export_hf.parse_arguments([*map(str, arguments), "--workers", "2"]), export_hf.plan)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_computes_the_same_logits(name, tmp_path):
    model = trained(name)
    step = saved(model, tmp_path)
    assert export(step, tmp_path / "out", "--hf-dir", base(tmp_path / "base", model, "float32")) == 0
    found, said = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"] and found.dtype == torch.float32
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    tokens = torch.arange(2, 42).view(2, 20)
    with torch.no_grad():
        assert torch.equal(found.eval()(tokens).logits, model(tokens).logits)
        # The control: change one element of one down projection.
        next(p for n, p in found.named_parameters() if n.endswith("down_proj.weight")).view(-1)[0] += 1
        assert not torch.equal(found(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16_every_weight_is_rounded_once(name, tmp_path):
    model = trained(name)
    step = saved(model, tmp_path)
    options = ("--hf-dir", base(tmp_path / "base", model, "bfloat16"), "--max-file-gb", "0.0001")
    assert export("--load-dir", step / "actor", "--save-dir", tmp_path / "out", *options) == 0
    files = [load_file(file) for file in sorted((tmp_path / "out").glob("*.safetensors"))]
    found = {tensor: value for file in files for tensor, value in file.items()}
    weights = {tensor: value for tensor, value in model.state_dict().items() if tensor in found}
    assert found.keys() == table_for(model.config).shapes.keys() == weights.keys() and len(files) > 1
    for tensor, value in weights.items():
        # Biases that no optimizer updates keep their dtype.
        expected = value if tensor.endswith("correction_bias") else value.to(torch.bfloat16)
        assert found[tensor].dtype == expected.dtype and torch.equal(found[tensor], expected), tensor
    # Files are filled up to 100 kB, unless a single tensor is larger, and the next file's tensor would not have fitted.
    sizes = [[value.nbytes for value in file.values()] for file in files]
    assert all(sum(of_file) <= 100_000 or len(of_file) == 1 for of_file in sizes)
    assert all(sum(of_file) + max(following) > 100_000 for of_file, following in pairwise(sizes))


@pytest.mark.parametrize(
    ("name", "dtype"), [("deepseek_v3", "bfloat16"), ("qwen2_tied", "float32"), ("qwen3_moe", "bfloat16")]
)
def test_an_export_is_verified_against_its_training(name, dtype, tmp_path, capsys):
    model = trained(name)
    step, out = saved(model, tmp_path), tmp_path / "out"
    assert export(step, out, "--hf-dir", base(tmp_path / "base", model, dtype)) == 0
    assert verify_ckpt.main([str(step), str(out), "--workers", "1"]) == 0
    assert f"equal: {len(table_for(model.config).shapes)} tensors" in capsys.readouterr().out
    file = next(out.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x40
    file.write_bytes(content)
    assert verify_ckpt.main([str(out), str(step / "actor"), "--workers", "1"]) == 1
    assert "different: " in capsys.readouterr().out


def test_two_trainings_are_compared_by_all_that_they_hold(tmp_path, capsys):
    model = trained("qwen3_moe")
    one, other = saved(model, tmp_path / "one"), saved(model, tmp_path / "other", TrainPlacement(2, 1, 1, 1, (3,)))
    line = [str(one), str(other), "--workers", "1"]
    assert verify_ckpt.main(line) == 2
    assert "does not name its model. Pass --hf-dir" in capsys.readouterr().err
    (one / "trainer.json").write_text(json.dumps({"model": model.config.to_dict()}))
    assert verify_ckpt.main(line) == 0
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    changed = saved(model, tmp_path / "changed")
    assert verify_ckpt.main([str(one), str(changed), "--workers", "1"]) == 1
    assert "different: master/model.norm.weight: [3] is" in capsys.readouterr().out
    assert verify_ckpt.main([str(one), str(saved(trained("qwen2"), tmp_path / "qwen2"))]) == 2
    assert "is not a tensor of this model" in capsys.readouterr().err


def test_the_model_of_the_run_is_taken_where_none_is_given(tmp_path):
    model = trained("qwen2")
    run = tmp_path / "run"
    step = saved(model, run / "checkpoints")
    path = base(tmp_path / "base", model, "float32")
    assert export(step, tmp_path / "out") == 2
    (run / "config.yaml").write_text(f"actor_rollout_ref:\n  model:\n    path: {path}\n")
    assert export(step, tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 100


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda base: (base / "tokenizer.json").write_text('{"version": "1.0"}'), "copied_files.tokenizer.json='"),
        (
            lambda base: (base / "chat_template.jinja").write_text("{{ bos_token }}"),
            "copied_files.chat_template.jinja=",
        ),
        (lambda base: (base / "tokenizer.json").unlink(), "copied_files.tokenizer.json='"),
        (lambda base: _set(base, rope_theta=123456.0), "config.rope_theta=10000.0, but this one has 123456.0. Choose"),
    ],
)
def test_export_of_a_changed_model_folder_rejected(change, says, tmp_path, capsys):
    """Another tokenizer must not pass as verified, and the export stays as it was."""
    model, out = trained("qwen2"), tmp_path / "out"
    step, model_folder = saved(model, tmp_path), base(tmp_path / "base", model, "float32")
    assert export(step, out, "--hf-dir", model_folder) == 0 == export(step, out, "--hf-dir", model_folder)
    before = {path: path.read_bytes() for path in out.iterdir()}
    change(model_folder)
    assert export(step, out, "--hf-dir", model_folder) == 2
    assert says in capsys.readouterr().err and {path: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda step, base: (step / "manifest.json").unlink(), "not a complete checkpoint"),
        (lambda step, base: (step / "actor" / file_name(3, 8)).unlink(), "cannot be read"),
        (lambda step, base: _edit(step / "actor" / file_name(0, 8)), "SHA-256"),
        (lambda step, base: _set(base, vocab_size=96), "does not fit into a tensor of shape"),
        (
            lambda step, base: _set(base, torch_dtype="int8"),
            "torch_dtype='int8' is invalid. Set it to the type to write, one of",
        ),
        (lambda step, base: _set(base, architectures=["NoModel"]), "no sharding spec for"),
    ],
)
def test_invalid_export_rejected(change, says, tmp_path, capsys):
    model = trained("qwen2")
    step, model_folder = saved(model, tmp_path), base(tmp_path / "base", model, "float32")
    change(step, model_folder)
    assert export(step, tmp_path / "out", "--hf-dir", model_folder) == 2
    message = capsys.readouterr().err.split("error: ")[-1]
    assert says in message and message.count("\n") == 1
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_a_folder_that_is_given_twice_rejected(tmp_path, capsys):
    for arguments in (("a",), ("a", "b", "--load-dir", "c"), ()):
        with pytest.raises(SystemExit) as rejected:
            export_hf.parse_arguments(list(arguments))
        assert rejected.value.code == 2


def _edit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _set(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
