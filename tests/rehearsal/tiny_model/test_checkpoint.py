"""A checkpoint is complete, loadable, written once for its inputs, and never partial."""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForVision2Seq, AutoTokenizer

from post_training.data import DataError
from post_training.layouts.published_names import published_name
from post_training.models.families import table_for
from rehearsal.tiny_model import checkpoint
from rehearsal.tiny_model.architecture import TINY_MODELS
from rehearsal.tiny_model.checkpoint import MARKER, CheckpointRequest, make_checkpoint
from rehearsal.tiny_model.warm_start import WarmStart


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text('{"problem": "1+1", "answer": "2"}\n')
    return path


@pytest.fixture(scope="module")
def random_request(data):
    return CheckpointRequest(data, seed=5, warm_start=None)


@pytest.fixture(scope="module")
def random_checkpoint(random_request, tmp_path_factory):
    return make_checkpoint(random_request, tmp_path_factory.mktemp("random") / "tiny", ignore)


def ignore(step: int, loss: float) -> None:
    pass


def tensors(folder) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module", params=sorted(TINY_MODELS))
def checkpoint_of_each_family(request, random_request, random_checkpoint, tmp_path_factory):
    if request.param == random_request.model_type:
        return random_checkpoint
    other = dataclasses.replace(random_request, model_type=request.param)
    return make_checkpoint(other, tmp_path_factory.mktemp("random") / "tiny", ignore)


def test_transformers_loads_every_weight(checkpoint_of_each_family):
    path = checkpoint_of_each_family.path
    has_images = (path / "preprocessor_config.json").exists()
    kind = AutoModelForVision2Seq if has_images else AutoModelForCausalLM
    model, report = kind.from_pretrained(path, torch_dtype="auto", output_loading_info=True)
    assert not any(report.values())
    assert model.dtype == torch.bfloat16
    state = {published_name(name): value for name, value in model.state_dict().items()}
    for name, stored in tensors(path).items():
        assert torch.equal(state[name], stored.to(torch.bfloat16)), name


def test_the_files_hold_the_tensors_of_the_familys_layout_table(checkpoint_of_each_family):
    config = json.loads((checkpoint_of_each_family.path / "config.json").read_text())
    stored = {name: tuple(value.shape) for name, value in tensors(checkpoint_of_each_family.path).items()}
    assert stored == dict(table_for(config).shapes)


def test_no_parameter_is_constant(checkpoint_of_each_family):
    """With a constant parameter, code that drops a norm or a bias would go unnoticed."""
    for name, value in tensors(checkpoint_of_each_family.path).items():
        assert value.float().std() > 0, name


def test_an_update_moves_wide_keys_and_values_as_tiny_ones(random_request, tmp_path):
    """Adam's first update moves an output by at most the learning rate times the sum of its inputs' magnitudes."""

    def latent_size(rank: int) -> float:
        changes = (("kv_lora_rank", rank),)
        request = dataclasses.replace(random_request, changes=changes, warm_start=WarmStart(steps=1, batch_size=2))
        made = make_checkpoint(request, tmp_path / str(rank), ignore)
        attention = AutoModelForCausalLM.from_pretrained(made.path).model.layers[0].self_attn
        with torch.no_grad():
            return attention.kv_a_layernorm(torch.randn(64, rank)).abs().sum(dim=-1).mean().item()

    assert latent_size(512) == pytest.approx(latent_size(64), rel=0.1)


def test_tied_weights_are_stored_once_and_the_tiny_qwen2_has_biases(random_request, tmp_path, monkeypatch):
    monkeypatch.setitem(TINY_MODELS, "qwen2", TINY_MODELS["qwen2"] | {"tie_word_embeddings": True})
    made = make_checkpoint(dataclasses.replace(random_request, model_type="qwen2"), tmp_path / "tiny", ignore)
    names = tensors(made.path).keys()
    assert "lm_head.weight" not in names
    assert sum(name.endswith("_proj.bias") for name in names) == 9


def test_the_tokenizer_comes_with_it(random_checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(random_checkpoint.path)
    config = json.loads((random_checkpoint.path / "config.json").read_text())
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (config["pad_token_id"], config["eos_token_id"])
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1"}], add_generation_prompt=True)


def test_the_model_has_the_parts_that_decide_which_code_runs(random_checkpoint):
    config = json.loads((random_checkpoint.path / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (config["n_routed_experts"], config["n_group"], config["topk_group"]) == (256, 8, 4)
    assert config["rope_scaling"]["type"] == "yarn"
    assert config["first_k_dense_replace"] == 1


def test_router_biases_lie_near_5_and_bfloat16_rounds_them(random_checkpoint):
    """DeepSeek-V3's published biases are like this; code that rounds them changes the chosen experts."""
    biases = [value for name, value in tensors(random_checkpoint.path).items() if name.endswith("correction_bias")]
    assert len(biases) == 2
    for bias in biases:
        assert bias.dtype == torch.float32 and bias.min() > 4.4 and bias.max() < 5.6
        assert (bias.to(torch.bfloat16).float() != bias).float().mean() > 0.9
        assert bias.to(torch.bfloat16).unique().numel() < 60 < bias.unique().numel()


def test_float32_holds_the_same_numbers_unrounded(random_request, random_checkpoint, tmp_path):
    exact = make_checkpoint(dataclasses.replace(random_request, dtype="float32"), tmp_path / "tiny", ignore)
    rounded = tensors(random_checkpoint.path)
    for name, value in tensors(exact.path).items():
        assert value.dtype == torch.float32
        assert torch.equal(value.to(rounded[name].dtype), rounded[name]), name


def test_the_same_inputs_are_kept_and_others_replace_them(random_request, tmp_path):
    first = make_checkpoint(random_request, tmp_path / "tiny", ignore)
    written = (first.path / "model.safetensors").stat().st_mtime_ns
    again = make_checkpoint(random_request, tmp_path / "tiny", ignore)
    assert (first.reused, again.reused) == (False, True)
    assert (first.path / "model.safetensors").stat().st_mtime_ns == written
    other = make_checkpoint(dataclasses.replace(random_request, seed=6), tmp_path / "tiny", ignore)
    assert not other.reused
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_the_fingerprint_covers_settings_seed_dtype_and_data(random_request, tmp_path):
    other_data = tmp_path / "train.jsonl"
    other_data.write_text('{"problem": "1+1", "answer": "3"}\n')
    variants = [
        random_request,
        dataclasses.replace(random_request, seed=6),
        dataclasses.replace(random_request, dtype="float32"),
        dataclasses.replace(random_request, model_type="qwen2"),
        dataclasses.replace(random_request, warm_start=WarmStart()),
        dataclasses.replace(random_request, warm_start=WarmStart(steps=1)),
        dataclasses.replace(random_request, data=other_data),
    ]
    assert len({variant.fingerprint() for variant in variants}) == len(variants)


def test_interrupted_run_leaves_existing_files(random_request, tmp_path):
    kept = make_checkpoint(random_request, tmp_path / "tiny", ignore)
    marker = (kept.path / MARKER).read_text()

    def interrupt(step: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(dataclasses.replace(random_request, warm_start=WarmStart(batch_size=2)), kept.path, interrupt)
    assert (kept.path / MARKER).read_text() == marker
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_checkpoint_that_another_run_has_made_meanwhile_is_kept(random_request, tmp_path, monkeypatch):
    """The checkpoint must not be replaced, since the other run may be reading it."""
    write, places = checkpoint._write_model, []

    def write_after_another(*arguments):
        monkeypatch.setattr(checkpoint, "_write_model", write)
        places.append(make_checkpoint(random_request, tmp_path / "tiny", ignore))
        places.append((tmp_path / "tiny" / "model.safetensors").stat().st_ino)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "_write_model", write_after_another)
    late = make_checkpoint(random_request, tmp_path / "tiny", ignore)
    first, file = places
    assert not first.reused and late.reused and (late.path / "model.safetensors").stat().st_ino == file
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_files_can_be_read_by_other_users(random_checkpoint):
    """The files are as readable as those of the checkout; safetensors would restrict its own."""
    modes = {path.name: path.stat().st_mode & 0o444 for path in random_checkpoint.path.iterdir()}
    assert modes.pop("model.safetensors") == 0o444 and set(modes.values()) == {0o444}


def test_a_folder_that_is_no_checkpoint_of_ours_rejected(random_request, tmp_path):
    (tmp_path / "precious").write_text("")
    with pytest.raises(FileExistsError, match="Choose another folder"):
        make_checkpoint(random_request, tmp_path, ignore)
    assert (tmp_path / "precious").exists()


def test_missing_data_is_named(random_request, tmp_path):
    request = dataclasses.replace(random_request, data=tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="nowhere.jsonl does not exist"):
        make_checkpoint(request, tmp_path / "tiny", ignore)


def test_a_problem_that_is_no_exercise_is_named(random_request, tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text('{"problem": "How many?", "answer": "2"}\n')
    with pytest.raises(ValueError, match='"How many[?]" is not an exercise'):
        make_checkpoint(dataclasses.replace(random_request, data=data), tmp_path / "tiny", ignore)


def test_a_warm_started_checkpoint_records_its_expected_reward(random_request, tmp_path):
    request = dataclasses.replace(random_request, warm_start=WarmStart(steps=2, batch_size=2))
    steps = []
    made = make_checkpoint(request, tmp_path / "tiny", lambda step, loss: steps.append(step))
    assert steps == [1, 2]
    assert 0 <= made.expected_reward < 0.5
    assert make_checkpoint(request, tmp_path / "tiny", ignore).expected_reward == made.expected_reward
