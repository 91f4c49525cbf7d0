"""A request that goes on at another engine, and what comes back of it.

A request that moves is a new one for the engine that takes it: the tokens that it has are its prompt, whose keys and
values are computed again, and what it may still generate is what was left. The engine that it was given to, its home,
goes on to hold its place among the results, and gets what was sampled elsewhere as if it had sampled it itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sampled:
    """Tokens with their log-probs, in vLLM's order: `candidates` and `log_probs` a list a token, or nothing where none
    were asked for. finish_reason: vLLM's number for it, once the request has finished."""

    tokens: list[int]
    candidates: list[list[int]]
    log_probs: list[list[float]]
    ranks: list[int]
    finish_reason: int | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class MovingRequest:
    """home, home_id: the rank that it was given to, and its id there; tokens: prompt and what was generated; params:
    vLLM's SamplingParams, encoded; generator: the state of the request's random numbers, if it draws any; sampled: what
    its home has not heard of."""

    home: int
    home_id: str
    tokens: list[int]
    params: bytes
    end_token: int | None
    generator: bytes | None
    sampled: Sampled


@dataclass(frozen=True)
class FinishedRequest:
    """What was sampled of a request away from home."""

    home_id: str
    sampled: Sampled


def encoded(items: Sequence[MovingRequest] | Sequence[FinishedRequest]) -> bytes:
    """As bytes, without pickle; nothing is no bytes."""
    import msgspec

    return msgspec.msgpack.encode(items) if items else b""


def decoded(content: bytes, kind: type[Any]) -> list[Any]:
    """What `encoded` was given, of one kind."""
    import msgspec

    return [msgspec.convert(each, kind) for each in msgspec.msgpack.decode(content)] if content else []


def joined(outputs: Iterable[Any], before: Sampled | None = None) -> Sampled:
    """The outputs of one request in their order, vLLM's EngineCoreOutput, behind what it sampled before."""
    found = before or Sampled([], [], [], [])
    for output in outputs:
        candidates, log_probs, ranks = output.new_logprobs or ([], [], [])
        found = Sampled(
            [*found.tokens, *output.new_token_ids],
            [*found.candidates, *candidates],
            [*found.log_probs, *log_probs],
            [*found.ranks, *ranks],
            None if output.finish_reason is None else int(output.finish_reason),
            output.stop_reason,
        )
    return found


def output_of(finished: FinishedRequest) -> Any:
    """The EngineCoreOutput that the request's home takes for its own."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.outputs import LogprobsLists

    sampled = finished.sampled
    assert sampled.finish_reason is not None
    return EngineCoreOutput(
        request_id=finished.home_id,
        new_token_ids=sampled.tokens,
        new_logprobs=LogprobsLists(sampled.candidates, sampled.log_probs, sampled.ranks) if sampled.ranks else None,
        finish_reason=FinishReason(sampled.finish_reason),
        stop_reason=sampled.stop_reason,
    )


def parameters_left(request: Any) -> bytes:
    """The request's SamplingParams for what it may still generate, encoded."""
    import msgspec

    params, done = request.sampling_params, request.num_output_tokens
    left = {"max_tokens": request.max_tokens - done, "min_tokens": max(0, params.min_tokens - done)}
    return msgspec.msgpack.encode(msgspec.structs.replace(params, n=1, **left))


def arriving_request(moving: MovingRequest, request_id: str) -> Any:
    """The EngineCoreRequest with which another engine takes it over."""
    import msgspec
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=moving.tokens,
        mm_inputs=None,
        mm_hashes=None,
        mm_placeholders=None,
        sampling_params=msgspec.msgpack.decode(moving.params, type=SamplingParams),
        eos_token_id=moving.end_token,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


# What a request must leave alone to be moved: it would look at the tokens that were generated before the move, or is
# asked of the prompt. Name of the field and the only value that goes.
LEFT_ALONE: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "prompt_logprobs": None,
    "guided_decoding": None,
    "logits_processors": None,
}
_EMPTY = ("stop", "bad_words", "extra_args")


def require_movable(params: Any, switch: str) -> None:
    """Reject SamplingParams with which another engine would not go on alike.

    Raises:
        ValueError: names the parameter.
    """
    held = [name for name, value in LEFT_ALONE.items() if getattr(params, name) != value]
    held += [name for name in _EMPTY if getattr(params, name)]
    if held:
        raise ValueError(
            f"{switch}=true cannot be combined with the sampling parameter {held[0]}={getattr(params, held[0])!r}, "
            "which looks at where a request began; take one of them away"
        )
