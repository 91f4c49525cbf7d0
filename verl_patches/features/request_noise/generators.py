"""Random numbers that belong to a request, whatever runs beside it and however its prompt is cut.

Where a prompt is computed in parts, vLLM-Ascend draws a token after each and throws all but the last away. It then sets
the request's generator back by 4, and torch_npu has set it on by 12 for the draw. So during a part a request has no
generator in the batch: its row draws from the device's, which gets its state back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def with_noise_of_its_own(params: Any) -> Any:
    """SamplingParams with a seed from the engine's random numbers, unless they have one or take the likeliest token."""
    import msgspec

    if params.seed is not None or params.temperature == 0:
        return params
    return msgspec.structs.replace(params, seed=int(torch.randint(2**31 - 1, (1,), device="npu").item()))


def give_generators(runner: Any, scheduled: Mapping[str, int]) -> None:
    """Give each row of the batch the generator of its request, and a row none whose tokens end inside the prompt.

    runner: vLLM-Ascend's, whose batch is ready for a step; scheduled: tokens of the step by request.
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
    """What a step draws from the device's own random numbers is undone."""
    before = torch.npu.get_rng_state()
    try:
        yield
    finally:
        torch.npu.set_rng_state(before)
