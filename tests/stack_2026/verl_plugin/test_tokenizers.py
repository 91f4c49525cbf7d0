"""A tokenizer that would end verl's agent loop is rejected before Ray starts, with the error of the worker."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from rehearsal.tiny_model.tokenizer import PUBLISHED_ENDS, build_tokenizer
from tests.stack_2026.rehearsals import command
from tests.stack_2026.verl.test_jobs import DIES_256, MODELS, ONE_CARD, ONE_NODE
from verl_plugin.jobs.__main__ import main
from verl_plugin.jobs.tokenizers import MODEL, tokenizer_problems

JOBS = {"qwen3": ONE_CARD, "qwen3_moe": ONE_NODE, "deepseek_v3": DIES_256}
NONE = "{% for message in messages %}{% endfor %}"


def write_model(folder: Path, family: str, end: str | None = None, template: str | None = "own") -> Path:
    """Write a model folder: config.json, and a tokenizer whose end token is named `end`, by default as published."""
    tokenizer = build_tokenizer(end or PUBLISHED_ENDS[family])
    if template != "own":
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(MODELS[JOBS[family]]))
    return folder


def error_of_a_worker(folder: Path, family: str) -> str:
    """Return the error of verl's own agent loop with a folder's tokenizer, or "" if it starts."""
    from verl.utils.tokenizer import hf_tokenizer

    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(prompt_length=1, response_length=1))
    )
    try:
        SingleTurnAgentLoop(
            DictConfigWrap(config),
            None,
            hf_tokenizer(str(folder)),
            None,
            None,
            DictConfigWrap({}),
            hf_model_type=family,
        )
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", JOBS)
def test_tokenizer_with_the_published_end_is_taken(tmp_path, family):
    folder = write_model(tmp_path, family)
    assert list(tokenizer_problems({"path": folder}, family)) == [] and error_of_a_worker(folder, family) == ""


@pytest.mark.parametrize("family", JOBS)
def test_tokenizer_without_it_is_rejected_with_the_error_of_a_worker(tmp_path, family):
    folder = write_model(tmp_path, family, "<|end|>")
    (sentence,) = tokenizer_problems({"path": folder}, family)
    wanted = error_of_a_worker(folder, family)
    assert repr(PUBLISHED_ENDS[family]) in wanted and wanted in sentence
    assert sentence.startswith(f"{MODEL}.path={folder} is invalid: ") and "Set it to a folder" in sentence


def test_other_family_is_not_asked_for_that_token(tmp_path):
    assert list(tokenizer_problems({"path": write_model(tmp_path, "qwen3", "<|end|>")}, "llama")) == []


def test_tokenizer_without_a_template_is_rejected(tmp_path):
    folder = write_model(tmp_path, "qwen3", template=None)
    (sentence,) = tokenizer_problems({"path": folder}, "qwen3")
    assert "chat_template" in sentence and "\n" not in sentence
    assert list(tokenizer_problems({"path": folder, "custom_chat_template": NONE}, "qwen3")) == []


def test_path_of_the_tokenizer_wins_against_that_of_the_model(tmp_path):
    wrong, right = write_model(tmp_path / "wrong", "qwen3", "<|end|>"), write_model(tmp_path / "right", "qwen3")
    assert list(tokenizer_problems({"path": wrong, "tokenizer_path": right}, "qwen3")) == []
    (sentence,) = tokenizer_problems({"path": right, "tokenizer_path": wrong}, "qwen3")
    assert sentence.startswith(f"{MODEL}.tokenizer_path={wrong} is invalid: ")


def test_folder_that_is_not_here_is_left_to_the_workers(tmp_path):
    assert list(tokenizer_problems({"path": "Qwen/Qwen3-0.6B"}, "qwen3")) == []
    assert list(tokenizer_problems({"path": tmp_path}, "qwen3")) == []


@pytest.mark.parametrize(("end", "code"), [("<|end|>", 2), (None, 0)])
def test_check_of_a_job_looks_at_the_tokenizer(tmp_path, capsys, end, code):
    folder = write_model(tmp_path, "qwen3", end)
    assert main(["--config-name", ONE_CARD, f"{MODEL}.path={folder}"]) == code
    said = capsys.readouterr().err
    assert (said == "") if code == 0 else (said.count("\n") == 1 and "'<|im_end|>'" in said)


def test_rehearsal_rejects_it_before_anything_is_made(tmp_path):
    folder, output = write_model(tmp_path / "model", "qwen3", "<|end|>"), tmp_path / "run"
    arguments = ("--model", "qwen3", "--backend", "fsdp2", "--dies", "1", "--output", str(output))
    ended = command(*arguments, "--", f"{MODEL}.path={folder}")
    assert ended.returncode == 2 and f"{MODEL}.path={folder} is invalid" in ended.stderr, ended.stderr
    assert not output.exists()
