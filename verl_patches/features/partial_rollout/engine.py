"""One engine's part of a rollout that may end before its last answers, and of taking them up again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from post_training.plan.partial_rollout import may_end
from verl_patches.features.dp_sync.decode_loop import DecodeLoop, loop_of
from verl_patches.features.dp_sync.feature import DP_SYNC
from verl_patches.features.dp_sync.sync_window import LocalState, ReducedState
from verl_patches.features.rollout_rebalance.requests import LEFT_ALONE

LEFT = "abort"
"""vLLM's reason for which an answer ended that goes on in a later step."""


@dataclass(frozen=True)
class Begun:
    """What an answer has: tokens with their log-probs; finished: it is only to be returned."""

    tokens: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    finished: bool = False


@dataclass(frozen=True)
class Row:
    """The answers to one prompt; due: the rollout does not end before they are finished."""

    answers: Sequence[Begun]
    due: bool = False


@dataclass(frozen=True)
class Share:
    """The rollout ends when `groups` of all `rows` are finished; of an instance's rows, as many of them."""

    groups: int
    rows: int

    def of(self, rows: int) -> int:
        """Of so many rows, rounded up: of 10 rows where 4 of 16 are enough, 3."""
        return -(-self.groups * rows // self.rows)


class Ending:
    """When the rollout ends: `needed` groups of the instance are finished, and all that are due, here and elsewhere.
    unfinished: answers by row."""

    def __init__(self, needed: int, unfinished: list[int], due: Sequence[bool]) -> None:
        self.needed, self.unfinished, self.due = needed, unfinished, due
        self.decided = False

    @property
    def finished(self) -> int:
        """Groups of this engine."""
        return sum(not answers for answers in self.unfinished)

    @property
    def held(self) -> bool:
        """Whether a group of this engine is due and not finished."""
        return any(answers and due for answers, due in zip(self.unfinished, self.due, strict=True))

    def counted(self, offer: LocalState) -> LocalState:
        """See `decode_loop.EarlyEnd`."""
        return replace(offer, finished=self.finished, held=self.held)

    def decide(self, agreed: ReducedState) -> bool:
        """See `decode_loop.EarlyEnd`."""
        self.decided = self.decided or may_end(agreed.finished, self.needed, agreed.held)
        return self.decided


def generate(llm: Any, prompts: Sequence[Sequence[int]], params: Any, rows: Sequence[Row], share: Share) -> list[Any]:
    """What `llm.generate` returns, vLLM's RequestOutputs in the order of `prompts`, each with `params.n` answers.

    An answer goes on behind the tokens that it has, which its output begins with; one that is left behind has the
    reason `LEFT`. Every engine of an instance must call this, with as many prompts.

    Raises:
        ValueError: an answer could not go on alike; names the parameter.
    """
    check_parameters(params)
    engine = llm.llm_engine
    engines = engine.vllm_config.parallel_config.data_parallel_size
    places: dict[str, tuple[int, int]] = {}
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        for place, answer in enumerate(row.answers):
            if not answer.finished:
                name = str(next(llm.request_counter))
                places[name] = number, place
                engine.add_request(name, resumed_prompt(prompt, answer), parameters_left(params, len(answer.tokens)))
    unfinished = [sum(not answer.finished for answer in row.answers) for row in rows]
    ending = Ending(share.of(engines * len(rows)), unfinished, [row.due for row in rows])
    found: dict[tuple[int, int], Any] = {}
    with _ends_by(engine, ending) as is_over:
        while engine.has_unfinished_requests():
            left = {name: at for name, at in places.items() if at not in found} if is_over() else {}
            if left:
                found |= _left_behind(engine, left)
                continue
            for output in engine.step():
                at = places[output.request_id]
                found[at], ending.unfinished[at[0]] = output.outputs[0], ending.unfinished[at[0]] - 1
    return [_output(number, prompt, row, found) for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True))]


def check_parameters(params: Any) -> None:
    """An answer goes on with a prompt that is longer, and with other random numbers.

    Raises:
        ValueError: a parameter depends on where the answer began; names it.
    """
    for name, value in {**LEFT_ALONE, "seed": None, "stop": [], "bad_words": None}.items():
        found = getattr(params, name)
        if found not in (None, [], value):
            raise ValueError(
                f"a partial rollout cannot be combined with the sampling parameter {name}={found!r}, which looks at "
                "where an answer began; leave it out"
            )


def resumed_prompt(prompt: Sequence[int], answer: Begun) -> dict[str, list[int]]:
    """What the engine gets for a prompt: the tokens that the answer has, too."""
    return {"prompt_token_ids": [*prompt, *answer.tokens]}


def parameters_left(params: Any, done: int) -> Any:
    """SamplingParams for one answer that has `done` tokens."""
    from vllm.sampling_params import RequestOutputKind

    left = params.clone()
    left.n, left.output_kind = 1, RequestOutputKind.FINAL_ONLY
    left.max_tokens, left.min_tokens = params.max_tokens - done, max(0, params.min_tokens - done)
    return left


@contextmanager
def _ends_by(engine: Any, ending: Ending) -> Iterator[Callable[[], bool]]:
    """Within, what is returned says whether the rollout is over; engines that form one model agree on it."""
    if engine.dp_group is None:
        yield lambda: may_end([ending.finished], ending.needed, ending.held)
        return
    from vllm.distributed.parallel_state import get_dp_group

    loop: DecodeLoop = loop_of(get_dp_group(), DP_SYNC.current().lease_steps)
    loop.early_end = ending
    try:
        yield lambda: ending.decided and not loop.window.left
    finally:
        loop.early_end = None


def _left_behind(engine: Any, places: dict[str, tuple[int, int]]) -> dict[tuple[int, int], Any]:
    """What the unfinished requests have, by their places; they leave the engine."""
    from vllm.v1.engine import FinishReason

    states = engine.output_processor.request_states
    found = {
        at: states[name].make_request_output([], FinishReason.ABORT, None).outputs[0] for name, at in places.items()
    }
    engine.abort_request(list(places))
    return found


def _output(number: int, prompt: Sequence[int], row: Row, found: dict[tuple[int, int], Any]) -> Any:
    """vLLM's RequestOutput of a row: every answer with what it had, and then what was sampled now."""
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sequence import Logprob

    outputs = []
    for place, answer in enumerate(row.answers):
        sampled = found.get((number, place))
        had = [{token: Logprob(value)} for token, value in zip(answer.tokens, answer.log_probs, strict=True)]
        new = (list(sampled.token_ids), list(sampled.logprobs or [])) if sampled is not None else ([], [])
        reason = sampled.finish_reason if sampled is not None else "stop"
        outputs.append(CompletionOutput(place, "", [*answer.tokens, *new[0]], None, [*had, *new[1]], reason))
    return RequestOutput(str(number), None, list(prompt), None, outputs, finished=True)
