"""Carrying out a schedule: pack from live weights, one `all_to_all_single` of bytes a round, scatter into live weights.

Packing reads through the layout's view and scattering writes through it, so a transpose, a fused neighbour or a
declared change of type costs no pass of its own and touches only what travels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl_patches.features.reshard.layout import Piece
from verl_patches.features.reshard.schedule import Chunk, Direction, Round

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Side:
    """The live tensors and the layout of one side of a rank, and the type in which its pieces travel."""

    tensors: Tensors
    pieces: Sequence[Piece]
    wire_types: Mapping[str, torch.dtype]

    def region(self, chunk: Chunk) -> torch.Tensor:
        """The live memory of a chunk."""
        held = self.pieces[chunk.piece].locate(self.tensors)
        rows, columns = chunk.narrow
        return held[slice(*rows)] if held.dim() == 1 else held[slice(*rows), slice(*columns)]

    def staged(self, buffer: torch.Tensor, chunk: Chunk, shape: torch.Size) -> torch.Tensor:
        """The memory of a chunk in a staging buffer of bytes, in its wire type."""
        wire_type = self.wire_types[self.pieces[chunk.piece].canonical]
        return buffer[chunk.start : chunk.stop].view(wire_type).view(shape)


class Staging:
    """Byte buffers for one or two rounds in flight, released together when the exchange is over."""

    def __init__(self, rounds: Sequence[Round], slots: int, device: torch.device) -> None:
        sizes = (max((step.send.size for step in rounds), default=0), max((r.receive.size for r in rounds), default=0))
        slots = min(slots, len(rounds))
        self.send = [torch.empty(sizes[0], dtype=torch.uint8, device=device) for _ in range(slots)]
        self.receive = [torch.empty(sizes[1], dtype=torch.uint8, device=device) for _ in range(slots)]
        self.bytes = slots * sum(sizes)


def pack(side: Side, direction: Direction, buffer: torch.Tensor) -> None:
    """Copy what the round sends from live tensors into the staging buffer, in the order and type of the wire."""
    for chunk in direction.chunks:
        source = side.region(chunk)
        side.staged(buffer, chunk, source.shape).copy_(source)


def scatter(side: Side, direction: Direction, buffer: torch.Tensor) -> None:
    """Copy what the round received from the staging buffer into live tensors."""
    for chunk in direction.chunks:
        target = side.region(chunk)
        target.copy_(side.staged(buffer, chunk, target.shape))


def exchange(
    rounds: Sequence[Round], source: Side, target: Side, group: dist.ProcessGroup, slots: int, device: torch.device
) -> int:
    """Run all rounds and return the bytes of staging memory that were held.

    slots: 1 runs the rounds one after the other; 2 packs a round while the round before it travels.
    """
    staging = Staging(rounds, slots, device)
    flying: tuple[int, dist.Work] | None = None
    for number, step in enumerate(rounds):
        slot = number % slots
        pack(source, step.send, staging.send[slot])
        work = dist.all_to_all_single(
            staging.receive[slot][: step.receive.size],
            staging.send[slot][: step.send.size],
            list(step.receive.splits),
            list(step.send.splits),
            group=group,
            async_op=True,
        )
        if slots == 1:
            _land(target, step, work, staging.receive[slot])
        else:
            if flying is not None:
                _land(target, rounds[flying[0]], flying[1], staging.receive[flying[0] % slots])
            flying = number, work
    if flying is not None:
        _land(target, rounds[flying[0]], flying[1], staging.receive[flying[0] % slots])
    return staging.bytes


def _land(target: Side, step: Round, work: dist.Work, buffer: torch.Tensor) -> None:
    work.wait()
    scatter(target, step.receive, buffer)
