"""One engine's part of a rollout that may end before its last answers, and that continues earlier ones."""

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
"""vLLM's finish reason of an answer that continues in a later step."""


@dataclass(frozen=True)
class Begun:
    """An answer so far: its tokens and their log-probs; a finished one is only returned."""

    tokens: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    finished: bool = False


@dataclass(frozen=True)
class Row:
    """The answers to one prompt; if they are due, the rollout does not end before they are finished."""

    answers: Sequence[Begun]
    due: bool = False


@dataclass(frozen=True)
class Share:
    """The share of groups that ends a rollout: `groups` of all `rows`; an instance needs the same share of its rows."""

    groups: int
    rows: int

    def of(self, rows: int) -> int:
        """Return the groups needed out of `rows`, rounded up: 3 out of 10 rows if 4 out of 16 are enough."""
        return -(-self.groups * rows // self.rows)


class Ending:
    """The end of a rollout: when `needed` groups of the instance have finished, and all due ones on every engine.

    Args:
        needed: groups of the whole instance.
        unfinished: number of unfinished answers, by row of this engine.
        due: whether the answers are due, by row.
    """

    def __init__(self, needed: int, unfinished: list[int], due: Sequence[bool]) -> None:
        self.needed, self.unfinished, self.due = needed, unfinished, due
        self.decided = False

    @property
    def finished(self) -> int:
        """Number of finished groups of this engine."""
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
    """Generate as `llm.generate` does: vLLM's RequestOutputs in the order of `prompts`, each with `params.n` answers.

    An answer continues after its earlier tokens, with which its output begins; an unfinished one has the finish reason
    `LEFT`. Every engine of an instance must call this with the same number of prompts.

    Raises:
        ValueError: a sampling parameter depends on where an answer began; the message names it.
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
    """Check that answers can continue, which they do with a longer prompt and with other random numbers.

    Raises:
        ValueError: a parameter depends on where the answer began; the message names it.
    """
    for name, value in {**LEFT_ALONE, "seed": None, "stop": [], "bad_words": None}.items():
        found = getattr(params, name)
        if found not in (None, [], value):
            raise ValueError(
                f"a partial rollout cannot be combined with the sampling parameter {name}={found!r}, which depends on "
                "where an answer began. Remove it"
            )


def resumed_prompt(prompt: Sequence[int], answer: Begun) -> dict[str, list[int]]:
    """Return the engine's prompt for an answer that continues: the prompt's tokens and the answer's."""
    return {"prompt_token_ids": [*prompt, *answer.tokens]}


def parameters_left(params: Any, done: int) -> Any:
    """Return the SamplingParams for one answer that already has `done` tokens."""
    from vllm.sampling_params import RequestOutputKind

    left = params.clone()
    left.n, left.output_kind = 1, RequestOutputKind.FINAL_ONLY
    left.max_tokens, left.min_tokens = params.max_tokens - done, max(0, params.min_tokens - done)
    return left


@contextmanager
def _ends_by(engine: Any, ending: Ending) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether the rollout is over; engines that form one model agree on it."""
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
    """Remove unfinished requests from the engine; return their outputs so far, by their places."""
    from vllm.v1.engine import FinishReason

    states = engine.output_processor.request_states
    found = {
        at: states[name].make_request_output([], FinishReason.ABORT, None).outputs[0] for name, at in places.items()
    }
    engine.abort_request(list(places))
    return found


def _output(number: int, prompt: Sequence[int], row: Row, found: dict[tuple[int, int], Any]) -> Any:
    """Return vLLM's RequestOutput of a row: every answer with its earlier tokens followed by the new ones."""
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
