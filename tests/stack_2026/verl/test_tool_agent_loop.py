"""verl's agent loop with the calculator trains exactly the tokens that transformers' template marks as assistant's."""

import asyncio
from typing import Any

import pytest
from omegaconf import OmegaConf
from transformers.utils import get_json_schema
from verl.experimental.agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap, ToolListWrap
from verl.tools.tool_registry import load_all_tools
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder
from verl.workers.rollout.replica import TokenOutput

from post_training.calculator import calculate
from rehearsal.stack_2026.plan import TOOLS
from rehearsal.tiny_model.tokenizer import CALL_CLOSING, CALL_OPENING, TURN_SEPARATORS, build_tool_tokenizer

QUESTION = {"role": "user", "content": "7*8"}
CHATS: dict[str, list[str]] = {
    "a call, and the answer": ["7*8", r"\boxed{56}"],
    "two calls, and the answer": ["7*8", "56-1/2", r"\boxed{55.5}"],
    "a call that fails": ["7/0", "none"],
    "a call that is no arithmetic": ["__import__('os')", "none"],
    "no call": [r"\boxed{56}"],
}


class Scripted:
    """A server that answers with given texts; a token's log-prob is minus its position in the answer, from 1."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self._rows = iter([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts)

    async def generate(self, **_: Any) -> TokenOutput:
        row = next(self._rows)
        return TokenOutput(token_ids=row, log_probs=[-float(place + 1) for place in range(len(row))])


def written(turns: list[str]) -> list[str]:
    """Return the model's text in each turn; all but the last are tool calls."""
    return [*(f"{CALL_OPENING}{each}{CALL_CLOSING}" for each in turns[:-1]), turns[-1]]


async def looped(tokenizer: Any, family: str, turns: list[str], **limits: int) -> AgentLoopOutput:
    """Run verl's loop over a scripted server, with the tool as verl loads it."""
    multi_turn = {"max_user_turns": None, "max_assistant_turns": 4, "max_parallel_calls": 1, "format": "hermes",
                  "max_tool_response_length": 256, "tool_response_truncate_side": "middle"}  # fmt: skip
    rollout = {"multi_turn": multi_turn, "prompt_length": 64, "response_length": 200, "full_determinism": False}
    loop = ToolAgentLoop(
        trainer_config=DictConfigWrap(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout | limits}})),
        server_manager=Scripted(tokenizer, written(turns)),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(OmegaConf.create({})),
        hf_model_type=family,
        tools=ToolListWrap(load_all_tools(None, str(TOOLS["calculator"]))),
    )
    return await loop.run({}, raw_prompt=[QUESTION])


def expected(tokenizer: Any, turns: list[str]) -> tuple[list[int], list[int]]:
    """Return a chat's tokens and its mask, 1 for the assistant's tokens, from transformers' own template."""
    messages: list[dict[str, Any]] = [QUESTION]
    for each in turns[:-1]:
        call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": each}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": calculate(each)})
    encoded = tokenizer.apply_chat_template(
        [*messages, {"role": "assistant", "content": turns[-1]}],
        tools=[get_json_schema(calculate)],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    stop = len(encoded["assistant_masks"]) - encoded["assistant_masks"][::-1].index(1)
    return encoded["input_ids"][:stop], encoded["assistant_masks"][:stop]


@pytest.mark.parametrize("turns", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("family", TURN_SEPARATORS)
def test_trained_tokens_are_those_of_the_assistant(family, turns):
    tokenizer = build_tool_tokenizer(family)
    output = asyncio.run(looped(tokenizer, family, turns))
    tokens, marks = expected(tokenizer, turns)
    assert output.prompt_ids + output.response_ids == tokens
    assert [0] * len(output.prompt_ids) + output.response_mask == marks
    lengths = [len(tokenizer.encode(each, add_special_tokens=False)) + 1 for each in written(turns)]
    given = [-float(place + 1) for length in lengths for place in range(length)]
    assert [value for value, mark in zip(output.response_logprobs, output.response_mask, strict=True) if mark] == given
    assert output.num_turns == 2 * len(turns)


def test_loss_on_a_tools_tokens_detected(monkeypatch):
    upstream = ContinuousTokenBuilder.align_response_metadata

    def trained(self, merged, *arguments, **named):
        mask, log_probs = upstream(self, merged, *arguments, **named)
        return [1] * len(mask), log_probs

    monkeypatch.setattr(ContinuousTokenBuilder, "align_response_metadata", trained)
    tokenizer, turns = build_tool_tokenizer("qwen3"), CHATS["a call, and the answer"]
    output = asyncio.run(looped(tokenizer, "qwen3", turns))
    tokens, marks = expected(tokenizer, turns)
    assert output.prompt_ids + output.response_ids == tokens
    assert [0] * len(output.prompt_ids) + output.response_mask != marks


def test_result_that_does_not_fit_is_left_out():
    """Check that the answer ends with its call, as the length limit counts the result too."""
    tokenizer = build_tool_tokenizer("qwen3")
    output = asyncio.run(looped(tokenizer, "qwen3", CHATS["a call, and the answer"], response_length=8))
    tokens, _ = expected(tokenizer, CHATS["a call, and the answer"])
    own = len(tokenizer.encode(f"{CALL_OPENING}7*8{CALL_CLOSING}", add_special_tokens=False)) + 1
    assert output.prompt_ids + output.response_ids == tokens[: len(output.prompt_ids) + own]
    assert output.response_mask == [1] * own
