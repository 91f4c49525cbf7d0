"""Count progress inside a phase, wherever upstream code finishes a unit of work.

| phase | unit |
|---|---|
| ref, old_log_prob, values | a micro batch |
| update, update_critic | a micro batch's forward, its backward, the schedule of a mini batch, an optimizer step |
| rollout | a decode step (`vllm_patches/v1/engine/llm_engine.py`) |
| reshard | a bucket of the exchange (`reshard/exchange.py`) |
| reward, validation | an answer |
| checkpoint, loading of weights | a part of a file, at most `durable.PART_BYTES` |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from post_training.hang_detection import signs
from post_training.hang_detection.signs import process_signs

_optimizer_hooks: list[Any] = []


def with_progress(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Return Megatron's forward-backward `schedule` with progress at every forward, every backward and its end.

    Every pipeline stage counts its own micro batches; a stage that waits for another counts none.
    """

    def run(*, forward_step_func: Callable[..., Any], **options: Any) -> Any:
        outputs = schedule(forward_step_func=_counted(forward_step_func), **options)
        process_signs().progress()  # gradients are reduced over ranks; the optimizer's step is counted separately
        return outputs

    return run


def _counted(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    def step(batches: Any, model: Any) -> Any:
        output, loss = forward_step(batches, model)
        finished_forward(output)
        return output, loss

    return step


def finished_forward(output: Any) -> None:
    """Count the forward of a micro batch, and later its backward.

    Args:
        output: a tensor, or several in a mapping or a sequence. The backward counts once, when it has ended.
    """
    process_signs().progress()
    began: list[bool] = []

    def began_backward(_: torch.Tensor) -> None:
        if not began:
            began.append(True)
            # Runs at the end of this backward, as FSDP's own callback does.
            torch.autograd.Variable._execution_engine.queue_callback(process_signs().progress)

    for tensor in _tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(began_backward)


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, Mapping):
        output = list(output.values())
    found = output if isinstance(output, list | tuple) else [output]
    return [each for each in found if isinstance(each, torch.Tensor)]


def start_worker(interval_s: float) -> None:
    """Start sending as the worker of the rank that verl's environment names, and count its optimizer steps."""
    count_optimizer_steps()
    signs.start_in_ray(os.environ["RANK"], interval_s)


def count_optimizer_steps() -> None:
    """Count every step of every torch optimizer of this process from now on.

    torch calls the hook for all optimizers, so it counts FSDP's and those inside Megatron's, plain or chained.
    """
    if not _optimizer_hooks:
        _optimizer_hooks.append(register_optimizer_step_post_hook(lambda *_: process_signs().progress()))


@dataclass(frozen=True)
class CountedScore:
    """A reward function that counts progress at every return. verl's `prime` manager pickles it for other processes."""

    score: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.score(*args, **kwargs)
        process_signs().progress()
        return result


def count_answers(manager: Any) -> None:
    """Make a reward manager of verl count every answer that it scores; one without `compute_score` stays as it is.

    `naive` and `dapo` call it once an answer, `batch` once a batch. `prime` calls it in other processes, and counts in
    `single_compute_score`.
    """
    score = getattr(manager, "compute_score", None)
    if score is not None and not isinstance(score, CountedScore):
        manager.compute_score = CountedScore(score)


def file_progress(_: int) -> None:
    """Count a part of a file, for readers and writers that report bytes."""
    process_signs().progress()
