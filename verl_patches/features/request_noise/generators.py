"""Random numbers that belong to a request, whatever runs beside it and however its prompt is cut.

If a prompt is computed in chunks, vLLM-Ascend draws a token after each chunk and discards all but the last. It then
rewinds the request's generator by 4, but torch_npu has advanced it by 12 for the draw. So for all chunks but the last a
request has no generator in the batch: its row draws from the device's generator, whose state is then restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def with_noise_of_its_own(params: Any) -> Any:
    """Return the SamplingParams with a seed drawn by the engine, unless they have one or are greedy."""
    import msgspec

    if params.seed is not None or params.temperature == 0:
        return params
    return msgspec.structs.replace(params, seed=int(torch.randint(2**31 - 1, (1,), device="npu").item()))


def give_generators(runner: Any, scheduled: Mapping[str, int]) -> None:
    """Give each row of the batch the generator of its request, but none to a row whose tokens end inside the prompt.

    Args:
        runner: vLLM-Ascend's model runner, whose batch is ready for a step.
        scheduled: number of tokens in the step, by request.
    """
    batch = runner.input_batch
    for request_id, row in batch.req_id_to_index.items():
        state = runner.requests[request_id]
        if state.num_computed_tokens + scheduled[request_id] < state.num_tokens:
            batch.generators.pop(row, None)
        elif state.generator is not None:
            batch.generators[row] = state.generator


@contextmanager
def parts_leave_no_trace() -> Iterator[None]:
    """Restore the state of the device's generator after a step, as if nothing had been drawn from it."""
    before = torch.npu.get_rng_state()
    try:
        yield
    finally:
        torch.npu.set_rng_state(before)
