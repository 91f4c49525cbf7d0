"""Request seeds from the driver: a function of the step and of a prompt's place in its batch, so that a prompt's
samples do not depend on the engine that it is sent to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from verl import DataProto

SEED = "request_seed"
"""Column of a batch of prompts: int64 [prompts], the seed of each prompt's first answer; vLLM counts on from it."""
_LARGEST = 2**48

Call = Callable[[Any], Any]


class Seeds:
    """Draws the seeds of prompts.

    Args:
        run: the run's seed for rollouts.
        step: returns the number of the current training step.
        begun: the column that marks prompts whose answers continue from an earlier step.
    """

    def __init__(self, run: int, step: Callable[[], int], begun: str = "") -> None:
        self._run, self._step, self._begun = run, step, begun
        self._last = (-1, -1)

    def sending(self, generate: Call) -> Call:
        """Wrap verl's call for answers to send seeds with the prompts to train on.

        verl marks prompts for validation, and those that are answered greedily for a baseline, in their meta
        information; they are passed on unchanged, and so are prompts whose answers continue from an earlier step.
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
        """Draw the seeds of the next batch, int64 [prompts]; a step may have several batches."""
        step, (last, batches) = self._step(), self._last
        self._last = step, batches + 1 if step == last else 0
        drawn = np.random.Generator(np.random.PCG64((self._run, *self._last)))
        return torch.from_numpy(drawn.integers(_LARGEST, size=prompts))


def take_seeds(prompts: DataProto) -> list[int] | None:
    """Remove and return the seeds that the driver sent with the prompts; None if it sent none."""
    return prompts.batch.pop(SEED).tolist() if SEED in prompts.batch.keys() else None


@contextmanager
def seeded(llm: Any, seeds: Sequence[int] | None) -> Iterator[None]:
    """Let verl's call of `llm.generate`, which has one set of parameters for all prompts, give each prompt its seed."""
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
