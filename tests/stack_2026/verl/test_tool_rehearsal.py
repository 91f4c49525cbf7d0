"""GRPO over two turns with the calculator: whole steps of verl train the tokens that transformers marks.

The answers come from the tool: with a wrong one, or with none, almost no answer is correct.
"""

import json
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from post_training.calculator import calculate
from rehearsal.kept_options import OPTIONS_NAME
from rehearsal.resume_proof.comparison import metrics_of
from rehearsal.stack_2026.plan import Options, make_plan
from rehearsal.tiny_model.tokenizer import ASSISTANT, CALL_CLOSING, CALL_OPENING, TOOL, USER
from tests.stack_2026.rehearsals import ANSWERS, PROMPTS, check_computes_alike, rehearse
from verl_plugin.step_record.folder import RecordedStep, read_record

pytestmark = pytest.mark.slow
SMALL = ("--tool", "calculator", "--model", "qwen3", "--backend", "fsdp2", "--dies", "1")
ROLES = {USER: "user", ASSISTANT: "assistant", TOOL: "tool"}
CALL = re.compile(f'{re.escape(CALL_OPENING)}(?P<expression>[^"]*){re.escape(CALL_CLOSING)}')
_ROLLOUT = "actor_rollout_ref.rollout"
CONTROLS = {
    "wrong": f"{_ROLLOUT}.multi_turn.function_tool_path={Path(__file__).with_name('wrong_calculator.py')}",
    "none": f"{_ROLLOUT}.agent.default_agent_loop=single_turn_agent",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("tool") / "run"
    return folder, rehearse(folder, *SMALL, "--", "+trainer.record_steps=[1]")


def messages_of(tokenizer: Any, tokens: list[int]) -> list[dict[str, Any]] | None:
    """Return the chat for the tokens, or None if a turn of the model has no end, as in an answer that is too long."""
    roles = {tokenizer.convert_tokens_to_ids(token): role for token, role in ROLES.items()}
    places = [place for place, token in enumerate(tokens) if token in roles] + [len(tokens)]
    messages: list[dict[str, Any]] = []
    for start, stop in list(pairwise(places))[1:]:  # the first names the tool
        role, row = roles[tokens[start]], tokens[start + 1 : stop]
        if role == "assistant" and tokenizer.eos_token_id not in row:
            return None
        text = tokenizer.decode(row, skip_special_tokens=True)
        text = text.removesuffix("\n") if role == "assistant" else text
        call = CALL.fullmatch(text) if role == "assistant" else None
        if call is None:
            messages.append({"role": role, "content": text})
            continue
        function = {"name": "calculate", "arguments": {"expression": call["expression"]}}
        messages.append({"role": role, "content": "", "tool_calls": [{"type": "function", "function": function}]})
    return messages


def compared(tokenizer: Any, record: RecordedStep, trained: str) -> tuple[int, list[int]]:
    """Return how many samples transformers renders to the same tokens, and the numbers of those whose masks differ."""
    alike, differing = 0, []
    columns = [record.columns[name].rows for name in ("prompts", "responses", trained)]
    for place, (prompt, response, mask) in enumerate(zip(*columns, strict=True)):
        tokens = [*prompt.tolist(), *response.tolist()]
        messages = messages_of(tokenizer, tokens)
        if messages is None:
            continue
        rendered = tokenizer.apply_chat_template(
            messages, tools=[get_json_schema(calculate)], return_dict=True, return_assistant_tokens_mask=True
        )
        if rendered["input_ids"][: len(tokens)] == tokens:
            alike += 1
            marks = rendered["assistant_masks"][: len(tokens)]
            differing += [place] if marks != [0] * len(prompt) + mask.tolist() else []
    return alike, differing


def test_training_and_rollout_compute_alike(finished):
    folder, run = finished
    check_computes_alike(run, folder)
    for metrics in metrics_of(folder).values():
        assert metrics["num_turns/mean"] > 3.8  # question, call, result, answer
        assert metrics["critic/rewards/mean"] > 0.25


def test_loss_of_each_sample_is_that_of_transformers_template(finished):
    folder, _ = finished
    record, _ = read_record(folder / "checkpoints" / "records" / "step_1")
    kept = json.loads((folder / OPTIONS_NAME).read_text())
    tokenizer = AutoTokenizer.from_pretrained(make_plan(Options(**{**kept, "output": folder}), "").checkpoint)
    samples = len(record.columns["responses"].rows)
    for trained in ("response_mask", "loss_mask"):
        alike, differing = compared(tokenizer, record, trained)
        assert samples == PROMPTS * ANSWERS and alike > 0.9 * samples and differing == []
    # The control: if the tool's tokens had a loss, every sample would differ.
    record.columns["loss_mask"].rows[:] = [row.new_ones(len(row)) for row in record.columns["loss_mask"].rows]
    alike, differing = compared(tokenizer, record, "loss_mask")
    assert len(differing) > 0.9 * alike


def test_result_is_pythons_and_decides_the_reward(finished):
    folder, _ = finished
    record, _ = read_record(folder / "checkpoints" / "records" / "step_1")
    tokenizer = AutoTokenizer.from_pretrained(record.config["actor_rollout_ref"]["model"]["path"])
    columns = [record.columns[name].rows for name in ("prompts", "responses", "rm_scores")]
    checked = 0
    for prompt, response, scores in zip(*columns, strict=True):
        match messages_of(tokenizer, [*prompt.tolist(), *response.tolist()]):
            case [question, {"tool_calls": [call]}, {"role": "tool", "content": said}, answer]:
                expression = call["function"]["arguments"]["expression"]
                if re.fullmatch(r"\d[-+*]\d", expression):
                    assert said == str(eval(expression))
                right = answer["content"] == rf"\boxed{{{eval(question['content'].split()[0])}}}"
                assert (float(scores.sum()) == 1) >= right
                checked += 1
    assert checked > 0.75 * PROMPTS * ANSWERS


@pytest.mark.parametrize("name", CONTROLS)
def test_without_a_right_tool_answers_are_wrong(tmp_path, name):
    run = rehearse(tmp_path / "run", *SMALL, "--steps", "1", "--", CONTROLS[name])
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    [metrics] = metrics_of(tmp_path / "run").values()
    assert metrics["critic/rewards/mean"] < 0.15
    assert (metrics["num_turns/mean"] > 3.8) is (name == "wrong")
