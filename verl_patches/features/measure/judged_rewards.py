"""Scores a batch's answers in parallel and within one budget, where verl's reward manager takes them in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from post_training.rewards import batch
from post_training.rewards.process import shared_pool
from post_training.rewards.rules import prompt_opens_thought

_IN_TURN = "NaiveRewardManager"
_OPENED_THOUGHT = "<think>"
# Enough tokens at a prompt's end for <think> and the line feed after it, however they are tokenised.
_LAST_TOKENS = 12


@dataclass(frozen=True)
class _Answer:
    """One row as verl's manager scores it.

    Attributes:
        arguments: of the reward function.
        opened: the prompt ends within a thought.
    """

    arguments: dict[str, Any]
    opened: bool

    @property
    def key(self) -> tuple[str, str, str]:
        return batch.key_of(**self.arguments)


class JudgedRewards:
    """Wraps verl's reward manager to compute rule rewards before it asks for them, one thread per verifier process.

    Other reward functions, which need not be thread-safe, and other managers are called unchanged.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        if name == "_manager":  # copying asks for it before it is set
            raise AttributeError(name)
        return getattr(self._manager, name)

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        manager = self._manager
        in_turn = type(manager).__name__ == _IN_TURN and "rm_scores" not in data.batch.keys()
        if not in_turn or not batch.is_safe_for_threads():
            return manager(data, return_dict=return_dict)
        score = manager.compute_score

        def judged(answer: _Answer) -> Any:
            with prompt_opens_thought(answer.opened):
                return score(**answer.arguments)

        answers = {answer.key: answer for answer in self._answers(data)}
        scores = batch.judged_together(judged, list(answers.values()), shared_pool().size)
        manager.compute_score = batch.answered(dict(zip(answers, scores, strict=True)), score)
        try:
            return manager(data, return_dict=return_dict)
        finally:
            manager.compute_score = score

    def _answers(self, data: Any) -> Iterator[_Answer]:
        """Yield the rows of a DataProto with `prompts` [batch, prompt length], `responses` [batch, response length]."""
        tensors, others, decode = data.batch, data.non_tensor_batch, self._manager.tokenizer.decode
        prompts, responses = tensors["prompts"], tensors["responses"]
        length = prompts.shape[-1]
        prompt_lengths = tensors["attention_mask"][:, :length].sum(-1).tolist()
        response_lengths = tensors["attention_mask"][:, length:].sum(-1).tolist()
        # Prompts are padded on the left, responses on the right.
        ends = [row[-min(count, _LAST_TOKENS) :] for row, count in zip(prompts, prompt_lengths, strict=True)]
        answers = [row[:count] for row, count in zip(responses, response_lengths, strict=True)]
        sources, models = others[self._manager.reward_fn_key], others["reward_model"]
        extras = others.get("extra_info", [None] * len(answers))
        for source, answer, model, extra, end in zip(sources, answers, models, extras, ends, strict=True):
            arguments = {
                "data_source": source,
                "solution_str": decode(answer, skip_special_tokens=True),
                "ground_truth": model["ground_truth"],
                "extra_info": extra,
            }
            yield _Answer(arguments, decode(end, skip_special_tokens=False).rstrip().endswith(_OPENED_THOUGHT))


def judged_together(manager: Any) -> Any:
    """Wrap `manager` to score its answers together; None stays None."""
    return None if manager is None else JudgedRewards(manager)
