"""Reject training from weights that are not finite, since no update makes them finite again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from post_training.finite_steps.finite import all_finite
from post_training.report.run_error import RunError

_SHOWN = 3


class NonfiniteWeightsError(RunError):
    """Weights hold inf or nan; the message is one sentence that names tensors and ranks."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, "not_valid")


def check_weights(
    chunks: Iterable[torch.nn.Module], when: str, remedy: str, group: dist.ProcessGroup | None = None
) -> None:
    """Raise on every rank of `group` when the weights of any of them hold inf or nan. Collective: one all-gather.

    Args:
        chunks: the model chunks of this rank; their parameters and persistent buffers are checked.
        when: how the sentence begins, such as "the actor's weights as loaded from FOLDER".
        remedy: what to do about it.

    Raises:
        NonfiniteWeightsError: with the first tensors and their ranks.
    """
    mine = nonfinite_weights(chunks)
    found: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(found, mine, group=group)
    named = [f"{name} (rank {rank})" for rank, names in enumerate(found) for name in names]
    if named:
        more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        raise NonfiniteWeightsError(f"{when} contain inf or nan in {', '.join(named[:_SHOWN])}{more}; {remedy}")


def nonfinite_weights(chunks: Iterable[torch.nn.Module]) -> list[str]:
    """Return the names of tensors that hold inf or NaN. The host waits for the device once."""
    names, found = [], []
    for name, tensor in _weights(chunks):
        if tensor.is_floating_point():
            names.append(name)
            found.append(all_finite(tensor))
    if not names:
        return []
    return [name for name, finite in zip(names, torch.stack(found).tolist(), strict=True) if not finite]


def _weights(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in chunks:
        yield from chunk.named_parameters()
        for prefix, module in chunk.named_modules():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                # Buffers that are not saved with the weights are not loaded with them and may not be filled yet.
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    yield name, buffer
