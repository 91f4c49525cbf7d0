"""Writes a checkpoint while training goes on, from the host copies of the training state that residency has anyway.

Between two updates nothing writes weights and optimizer, so their host copies, made to free the device for the rollout,
do not change. A thread writes the rank's file from them, and the next update waits for it.
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
"""Residency's groups with a checkpoint's tensors, by the role of verl's checkpoint manager."""

OnHost = Callable[[torch.Tensor], torch.Tensor | None]


class BackgroundWriter:
    """Writes files one after the other in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._going: list[tuple[RankFile, Future[tuple[str, Written | None]]]] = []

    @property
    def is_writing(self) -> bool:
        """Whether a file was begun and not finished."""
        return bool(self._going)

    def begin(self, file: RankFile, on_host: OnHost) -> None:
        """Begin to write `file`, on this rank alone. Its host tensors must not change until `finish`.

        Args:
            file: the file of this rank.
            on_host: returns the host copy of a device tensor; if it returns None, a copy is made.
        """
        tensors = {name: _host_view(tensor, on_host) for name, tensor in file.tensors.items()}
        file = replace(file, tensors=tensors)
        self._going.append((file, self._thread.submit(file.write)))

    def finish(self) -> None:
        """Wait for the files in the order in which they were begun, and write the manifest of all ranks' files for
        each; every rank calls this.

        Raises:
            CheckpointError: a rank could not write; raised on every rank, and there is no manifest then.
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
    """Return the writer of this process."""
    return process_context().of(BackgroundWriter)
