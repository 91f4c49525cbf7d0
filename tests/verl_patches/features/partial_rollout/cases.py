"""The cases that `engine_program` runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MODEL, WINDOW, PROMPTS, LONGEST, PASSES = "deepseek8", 4, 8, 48, 4
STOP_TOKENS = list(range(3, 256, 20))


@dataclass(frozen=True)
class Case:
    """A case with `ranks` ranks, in engines of `tensor_parallel` ranks each."""

    ranks: int
    tensor_parallel: int = 1


def whole_length(params: Any, done: int) -> Any:
    """A faulty `parameters_left`: an answer may grow by its whole length again."""
    from vllm.sampling_params import RequestOutputKind

    left = params.clone()
    left.output_kind = RequestOutputKind.FINAL_ONLY
    return left


CASES = {"one": Case(1), "two": Case(2), "tensor parallel": Case(4, tensor_parallel=2)}
_ENGINE = "verl_patches.features.partial_rollout.engine"
FAULTS = {
    "tokens forgotten": (f"{_ENGINE}.resumed_prompt", lambda prompt, answer: {"prompt_token_ids": list(prompt)}),
    "length forgotten": (f"{_ENGINE}.parameters_left", whole_length),
}
