"""Messages for a request that continues at another engine, and for its result.

A request that moves is a new one for the engine that takes it: its tokens so far become the prompt, whose keys and
values are computed again, and its limits shrink to what was left. The engine that first got it, its home, keeps its
place among the results, and treats tokens that were sampled elsewhere as if it had sampled them itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sampled:
    """Sampled tokens with their log-probs.

    Attributes:
        tokens: token ids.
        candidates, log_probs: one list per token in vLLM's order; empty if no log-probs were requested.
        ranks: of the sampled tokens; empty if no log-probs were requested.
        finish_reason: vLLM's number of the reason, once the request has finished.
        stop_reason: vLLM's.
    """

    tokens: list[int]
    candidates: list[list[int]]
    log_probs: list[list[float]]
    ranks: list[int]
    finish_reason: int | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class MovingRequest:
    """A request on its way to another engine.

    Attributes:
        home: the rank that first got it.
        home_id: its id there.
        tokens: prompt and generated tokens.
        params: vLLM's SamplingParams for the rest, encoded.
        end_token: the id of its end token, if it has one.
        generator: the state of its random generator, if it has one.
        sampled: tokens that its home has not received yet.
    """

    home: int
    home_id: str
    tokens: list[int]
    params: bytes
    end_token: int | None
    generator: bytes | None
    sampled: Sampled


@dataclass(frozen=True)
class FinishedRequest:
    """The result of a request that finished away from home."""

    home_id: str
    sampled: Sampled


def encoded(items: Sequence[MovingRequest] | Sequence[FinishedRequest]) -> bytes:
    """Encode items as bytes, without pickle; no items give no bytes."""
    import msgspec

    return msgspec.msgpack.encode(items) if items else b""


def decoded(content: bytes, kind: type[Any]) -> list[Any]:
    """Decode the items, all of type `kind`, that `encoded` was given."""
    import msgspec

    return [msgspec.convert(each, kind) for each in msgspec.msgpack.decode(content)] if content else []


def joined(outputs: Iterable[Any], before: Sampled | None = None) -> Sampled:
    """Append the outputs of one request (vLLM's EngineCoreOutput), in order, to what it sampled `before`."""
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
    """Return the result as an EngineCoreOutput for the request's home."""
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
    """Return the request's SamplingParams for the tokens that it may still generate, encoded."""
    import msgspec

    params, done = request.sampling_params, request.num_output_tokens
    left = {"max_tokens": request.max_tokens - done, "min_tokens": max(0, params.min_tokens - done)}
    return msgspec.msgpack.encode(msgspec.structs.replace(params, n=1, **left))


def arriving_request(moving: MovingRequest, request_id: str) -> Any:
    """Return the EngineCoreRequest with which another engine takes over the request."""
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


# Sampling parameters that prevent a move, because they look at tokens generated before it or at the prompt: the name
# of the field and the only value that is allowed.
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
    """Reject SamplingParams with which another engine would continue differently.

    Raises:
        ValueError: a parameter prevents a move; the message names it.
    """
    held = [name for name, value in LEFT_ALONE.items() if getattr(params, name) != value]
    held += [name for name in _EMPTY if getattr(params, name)]
    if held:
        raise ValueError(
            f"{switch}=true cannot be combined with the sampling parameter {held[0]}={getattr(params, held[0])!r}, "
            "which depends on where a request began. Remove one of them"
        )
