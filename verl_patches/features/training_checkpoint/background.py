"""Writing a checkpoint while training goes on, from the host copies that residency has of the training state anyway.

Between two updates nobody writes weights and optimizer, and the copies of them that let the device give its memory to
the rollout do not change. A thread writes the rank's file from there; it is waited for before the next update begins.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from post_training.checkpoint.durable import Written
from post_training.process_context import process_context
from post_training.tensor_parts import host_copy
from verl_patches.features.training_checkpoint.saving import RankFile

GROUPS = {"actor": ("actor_params", "optimizer"), "critic": ("critic_params", "critic_optimizer")}
"""Residency's groups in which a checkpoint's tensors lie, by the role that verl's checkpoint manager has."""

OnHost = Callable[[torch.Tensor], torch.Tensor | None]


class BackgroundWriter:
    """Writes one file after the other in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._going: list[tuple[RankFile, Future[tuple[str, Written | None]]]] = []

    @property
    def is_writing(self) -> bool:
        """Whether a file was begun that nobody has waited for."""
        return bool(self._going)

    def begin(self, file: RankFile, on_host: OnHost) -> None:
        """Begin to write `file`, on this rank alone. Host tensors of it must stay as they are until `finish`.

        on_host: where the host has the elements of a tensor of the device; of one that it does not have, a copy is
        made.
        """
        tensors = {name: _host_view(tensor, on_host) for name, tensor in file.tensors.items()}
        file = replace(file, tensors=tensors)
        self._going.append((file, self._thread.submit(file.write)))

    def finish(self) -> None:
        """Wait for the files that are being written, in the order in which they were begun, and list all ranks' files
        of each; every rank calls it.

        Raises CheckpointError on every rank when one of them could not write; there is no manifest then.
        """
        going, self._going = self._going, []
        for file, writing in going:
            error = writing.exception()
            told = (f"{file.folder / file.name}: cannot be written ({error!r})", None) if error else writing.result()
            file.complete(*told)


def _host_view(tensor: torch.Tensor, on_host: OnHost) -> torch.Tensor:
    if tensor.is_cpu:
        return tensor
    held = on_host(tensor)
    return host_copy(tensor) if held is None else held


def process_writer() -> BackgroundWriter:
    """The one writer of this process."""
    return process_context().of(BackgroundWriter)
