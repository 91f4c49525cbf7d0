"""Run a schedule: pack from live weights, one `all_to_all_single` of bytes per bucket, scatter into live weights.

Packing reads through the layout's view and scattering writes through it, so a transpose, a fused neighbour or a
declared cast needs no separate pass and touches only the bytes that travel.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from post_training.layouts.layout import Shard
from post_training.reshard.failure import Attempt
from post_training.reshard.schedule import Bucket, Chunk, Direction

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Side:
    """The live tensors and the layout of one side of a rank, and the types in which its shards travel."""

    tensors: Tensors
    shards: Sequence[Shard]
    wire_types: Mapping[str, torch.dtype]

    def region(self, chunk: Chunk) -> torch.Tensor:
        """Return the live memory of a chunk."""
        held = self.shards[chunk.shard].locate(self.tensors)
        rows, columns = chunk.narrow
        return held[slice(*rows)] if held.dim() == 1 else held[slice(*rows), slice(*columns)]

    def staged(self, buffer: torch.Tensor, chunk: Chunk, shape: torch.Size) -> torch.Tensor:
        """Return the memory of a chunk in a staging buffer of bytes, in its wire type."""
        wire_type = self.wire_types[self.shards[chunk.shard].hf_name]
        return buffer[chunk.start : chunk.stop].view(wire_type).view(shape)


class Staging:
    """Byte buffers for one or two buckets in flight, released together when the exchange is over.

    Args:
        buckets: all that use the buffers.
        slots: buckets in flight.
        device: of the buffers.
        least: minimum bytes of a sending buffer.
    """

    def __init__(self, buckets: Sequence[Bucket], slots: int, device: torch.device, least: int = 0) -> None:
        sent = max((step.send.size for step in buckets), default=0)
        received = max((step.receive.size for step in buckets), default=0)
        sizes = (max(sent, least), received)
        slots = min(slots, max(len(buckets), bool(least)))
        self.send = [torch.empty(sizes[0], dtype=torch.uint8, device=device) for _ in range(slots)]
        self.receive = [torch.empty(sizes[1], dtype=torch.uint8, device=device) for _ in range(slots)]
        self.bytes = slots * sum(sizes)


def pack(side: Side, direction: Direction, buffer: torch.Tensor) -> None:
    """Copy the bucket's outgoing chunks from live tensors into the staging buffer, in wire order and wire type.

    Raises TransferError, which names the weight and the peer.
    """
    for chunk in direction.chunks:
        try:
            source = side.region(chunk)
            side.staged(buffer, chunk, source.shape).copy_(source)
        except Exception as error:
            raise TransferError(side, direction, chunk, "packing", "for") from error


def pass_on(copies: np.ndarray | None, received: torch.Tensor, sent: torch.Tensor) -> None:
    """Copy the bytes of the previous bucket that this one forwards; `copies` is `Bucket.forward`."""
    for source, target, size in () if copies is None else copies.tolist():
        sent[target : target + size].copy_(received[source : source + size])


def scatter(side: Side, direction: Direction, buffer: torch.Tensor) -> None:
    """Copy the bucket's received chunks from the staging buffer into live tensors.

    Raises TransferError, which names the weight and the peer.
    """
    for chunk in direction.chunks:
        try:
            target = side.region(chunk)
            target.copy_(side.staged(buffer, chunk, target.shape))
        except Exception as error:
            raise TransferError(side, direction, chunk, "writing", "from") from error


class TransferError(RuntimeError):
    """One chunk could not be packed or written. The text names weight, peer and cause, which is `__cause__`."""

    def __init__(self, side: Side, direction: Direction, chunk: Chunk, doing: str, toward: str) -> None:
        super().__init__(doing, side.shards[chunk.shard].hf_name, f"{toward} rank {direction.peer(chunk)}")

    def __str__(self) -> str:
        return f"{' '.join(self.args)}: {self.__cause__!r}"


@dataclass(frozen=True)
class Exchange:
    """All buckets of one leg of a plan on this rank.

    Attributes:
        leg: its name in errors.
        slots: 1 runs the buckets one after the other; 2 packs a bucket while the previous one travels, which buckets
            that pass bytes on do not allow.
        progress: called after every bucket that arrived, for the hang detector.

    Raises:
        ValueError: several slots, and a bucket passes bytes on.
    """

    leg: str
    buckets: Sequence[Bucket]
    source: Side
    target: Side
    group: dist.ProcessGroup
    slots: int
    device: torch.device
    progress: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        # A bucket passes on what came with the one before it, which has to be in the only receive buffer still.
        if self.slots > 1 and any(step.forward is not None for step in self.buckets):
            raise ValueError(f"slots={self.slots} is invalid: the {self.leg} passes bytes on. Set it to 1.")

    def run(self, attempt: Attempt) -> int:
        """Run all buckets and return the bytes of staging memory used.

        A failure of this rank is recorded in `attempt`. Exceptions of collectives are raised; HCCL's work is
        asynchronous, so they may come in a later bucket than the one that failed, or after the last.
        """
        staging = Staging(self.buckets, self.slots, self.device)
        for number, received in self.arrivals(attempt, staging):
            direction = self.buckets[number].receive
            attempt.step(f"{self._where(number)}, ", scatter, self.target, direction, received)
        return staging.bytes

    def arrivals(self, attempt: Attempt, staging: Staging) -> Iterator[tuple[int, torch.Tensor]]:
        """Run all buckets; yield each one's number and received bytes, which the next one overwrites.

        Failures are those of `run`.
        """
        flying: list[tuple[int, dist.Work]] = []
        for number in range(len(self.buckets)):
            attempt.reached = self._where(number)
            flying.append((number, self._launch(number, attempt, staging)))
            if len(flying) == self.slots:
                yield self._land(*flying.pop(0), staging)
        for waiting in flying:
            yield self._land(*waiting, staging)

    def _launch(self, number: int, attempt: Attempt, staging: Staging) -> dist.Work:
        slot, step = number % self.slots, self.buckets[number]
        attempt.step(f"{self._where(number)}, ", pack, self.source, step.send, staging.send[slot])
        # With one slot the previous bucket is still in the buffer into which this one will arrive.
        attempt.step(f"{self._where(number)}, ", pass_on, step.forward, staging.receive[slot], staging.send[slot])
        return dist.all_to_all_single(
            staging.receive[slot][: step.receive.size],
            staging.send[slot][: step.send.size],
            list(step.receive.splits),
            list(step.send.splits),
            group=self.group,
            async_op=True,
        )

    def _land(self, number: int, work: dist.Work, staging: Staging) -> tuple[int, torch.Tensor]:
        work.wait()
        self.progress()
        return number, staging.receive[number % self.slots][: self.buckets[number].receive.size]

    def _where(self, number: int) -> str:
        return f"in bucket {number + 1} of {len(self.buckets)} of the {self.leg}"
