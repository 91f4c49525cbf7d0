"""End tokens of published models, compared with the tokens at which vLLM stops for the same files."""

import json
from types import SimpleNamespace

import pytest

from post_training.end_tokens import EndTokensError, end_tokens

pytest.importorskip("vllm")
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.transformers_utils.config import try_get_generation_config  # noqa: E402
from vllm.v1.core.sched.utils import check_stop  # noqa: E402

# Name -> (tokenizer's end token, eos_token_id in config.json, generation_config.json or None, tokens that end answers).
PUBLISHED = {
    "Qwen3-8B": (151645, 151645, {"eos_token_id": [151645, 151643], "pad_token_id": 151643}, {151643, 151645}),
    "Qwen3-8B-Base, chat": (
        151645,
        151643,
        {"eos_token_id": 151643, "pad_token_id": 151643},
        {151643, 151645},
    ),
    "Llama-3.1-8B-Instruct": (128009, [128001, 128008, 128009], {"eos_token_id": [128001, 128008, 128009]}, None),
    "Llama-3.1-8B": (128001, 128001, {"eos_token_id": 128001}, {128001}),
    "DeepSeek-V3": (1, 1, {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1}, {1}),
    "GLM-4-9B": (151329, [151329, 151336, 151338], {"eos_token_id": [151329, 151336, 151338]}, None),
    "eos_token_id absent": (2, 7, {"_from_model_config": True, "bos_token_id": 1, "pad_token_id": 0}, {2}),
    "eos_token_id null": (2, 7, {"eos_token_id": None}, {2}),
    "end is padding": (2, 0, {"eos_token_id": 0, "pad_token_id": 0}, {0, 2}),
    "no generation_config.json": (2, [7, 8], None, {2, 7, 8}),
    "no end in the tokenizer": (None, 7, {"eos_token_id": 7}, {7}),
}


def write(folder, of_model, generation):
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "eos_token_id": of_model}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({**generation, "transformers_version": "4.51.1"}))


def stops_of_vllm(folder, of_tokenizer, candidates, **given):
    """Return the tokens at which vLLM's scheduler finishes a request, given its processor's sampling parameters."""
    params = SamplingParams(max_tokens=9, **given)
    fields = try_get_generation_config(str(folder), trust_remote_code=False).to_diff_dict()
    params.update_from_generation_config(fields, of_tokenizer)

    def stops(token):
        request = SimpleNamespace(
            num_tokens=3, num_output_tokens=1, max_tokens=9, sampling_params=params, output_token_ids=[token],
            eos_token_id=of_tokenizer,
        )  # fmt: skip
        return check_stop(request, 99)

    return {token for token in candidates if stops(token)}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("given", [{}, {"stop_token_ids": [5]}, {"ignore_eos": True, "stop_token_ids": [5]}], ids=str)
def test_end_tokens_are_those_at_which_vllm_stops(tmp_path, name, given):
    of_tokenizer, of_model, generation, expected = PUBLISHED[name]
    write(tmp_path, of_model, generation)
    found = set(end_tokens(tmp_path, of_tokenizer, **given).tokens)
    of_files = expected or set(of_model)
    assert found == (set() if "ignore_eos" in given else of_files) | set(given.get("stop_token_ids", ()))
    candidates = {*of_files, 0, 3, 5, 7, of_tokenizer or 3}
    assert found == stops_of_vllm(tmp_path, of_tokenizer, candidates, **given)


def test_another_folder_of_generation_settings_is_read(tmp_path):
    write(tmp_path, 7, {"eos_token_id": 7})
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", 7, {"eos_token_id": [8, 9]})
    assert end_tokens(tmp_path, 2, generation=str(tmp_path / "other")).tokens == (2, 8, 9)
    assert all(end_tokens(tmp_path, 2, generation=word).tokens == (2, 7) for word in ("vllm", "auto"))


@pytest.mark.parametrize("of_model", [None, {"eos_token_id": 5}], ids=["no file", "file"])
@pytest.mark.parametrize("of_other", [None, {"eos_token_id": [8, 9]}, {"pad_token_id": 0}], ids=str)
def test_another_folder_may_lack_the_file_that_the_model_has(tmp_path, of_model, of_other):
    """vLLM reads everything, including config.json, from the folder that it is given."""
    other = tmp_path / "other"
    other.mkdir()
    write(tmp_path, 7, of_model)
    write(other, 3, of_other)
    found = set(end_tokens(tmp_path, 2, generation=str(other)).tokens)
    assert found == stops_of_vllm(other, 2, {2, 3, 5, 7, 8, 9})


def test_the_line_of_the_start_names_tokens_and_files(tmp_path):
    write(tmp_path, 151643, {"eos_token_id": [151643, 151645]})
    assert str(end_tokens(tmp_path, 151645)) == (
        "Answers end at 151643 (generation_config.json), 151645 (tokenizer and generation_config.json)"
    )
    assert str(end_tokens(tmp_path, 151645, ignore_eos=True)) == "Answers end at no token (ignore_eos)"


@pytest.mark.parametrize("value", ['"<|im_end|>"', "true", "[1, null]", "-1"])
def test_other_values_than_tokens_rejected(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(
        EndTokensError, match=r"eos_token_id=.* of .*generation_config.json is invalid: not a token. Set"
    ):
        end_tokens(tmp_path, 2)


def test_a_torn_file_is_one_sentence(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1')
    with pytest.raises(EndTokensError, match="generation_config.json is not JSON .*Copy the model again"):
        end_tokens(tmp_path, 2)
