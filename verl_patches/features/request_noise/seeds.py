"""Seeds of requests that the driver gives: a function of the step and of a prompt's place in its batch, so that what a
prompt samples does not depend on the engine that it is sent to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from verl import DataProto

SEED = "request_seed"
"""Column of a batch of prompts: int64 [prompts], seed of the first answer to each; the others follow it."""
_LARGEST = 2**48

Call = Callable[[Any], Any]


class Seeds:
    """run: the run's seed for rollouts; step: the number of the step that is being trained; begun: the column that
    prompts have whose answers go on from an earlier step."""

    def __init__(self, run: int, step: Callable[[], int], begun: str = "") -> None:
        self._run, self._step, self._begun = run, step, begun
        self._last = (-1, -1)

    def sending(self, generate: Call) -> Call:
        """verl's call for answers, of which those to train on draw from seeds of the driver's.

        verl marks prompts for validation, and those that are answered greedily for a baseline, in their meta
        information; they are passed on as they are, as answers that go on from an earlier step.
        """

        def call(prompts: DataProto) -> DataProto:
            from verl import DataProto

            meta = prompts.meta_info
            if meta.get("validate") or not meta.get("do_sample", True) or self._begun in prompts.non_tensor_batch:
                return generate(prompts)
            batch = prompts.batch.clone(recurse=False)
            batch[SEED] = self.draw(len(prompts))
            return generate(DataProto(batch, dict(prompts.non_tensor_batch), meta))

        return call

    def draw(self, prompts: int) -> torch.Tensor:
        """Seeds of the next batch, int64 [prompts]; a step may have several batches."""
        step, (last, batches) = self._step(), self._last
        self._last = step, batches + 1 if step == last else 0
        drawn = np.random.Generator(np.random.PCG64((self._run, *self._last)))
        return torch.from_numpy(drawn.integers(_LARGEST, size=prompts))


def take_seeds(prompts: DataProto) -> list[int] | None:
    """What the driver has sent with the prompts, which is taken out; None where it has sent nothing."""
    return prompts.batch.pop(SEED).tolist() if SEED in prompts.batch.keys() else None


@contextmanager
def seeded(llm: Any, seeds: Sequence[int] | None) -> Iterator[None]:
    """Within, verl's call of `llm.generate`, with one set of parameters for all prompts, gives each its seed."""
    if seeds is None:
        yield
        return
    generate = llm.generate

    def with_seeds(prompts: Sequence[Any], sampling_params: Any, **options: Any) -> Any:
        import msgspec

        if sampling_params.temperature == 0:
            return generate(prompts, sampling_params=sampling_params, **options)
        each = [msgspec.structs.replace(sampling_params, seed=seed) for seed in seeds]
        return generate(prompts, sampling_params=each, **options)

    llm.generate = with_seeds
    try:
        yield
    finally:
        vars(llm).pop("generate", None)
