"""A subprocess of the self-test on an emulated die with a fault: `python -m tests.scripts.planted_device FAULT`."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

from scripts.health_checks import device_checks


def without_events_and_splits() -> None:
    """Make streams ignore events, and all-to-all return its input in a wrong order."""
    exchange = dist.all_to_all_single

    def in_turn(incoming: torch.Tensor, outgoing: torch.Tensor, received: list[int], sent: list[int]) -> None:
        exchange(incoming, outgoing, received, sent)
        incoming.copy_(incoming.flip(0))

    torch.npu.Stream.wait_event = lambda stream, event: None
    dist.all_to_all_single = in_turn


def hanging() -> None:
    """Make an operator hang."""
    torch.Tensor.amin = lambda tensor: signal.pause()


def ending() -> None:
    """Make an operator end the process."""
    torch.Tensor.amin = lambda tensor: os.kill(os.getpid(), signal.SIGSEGV)


def closed() -> None:
    """Make every die fail to open."""

    def rejected(die: int) -> None:
        raise RuntimeError(f"aclrtSetDevice of die {die} failed, error code is 507033")

    torch.npu.set_device = rejected


if __name__ == "__main__":
    {each.__name__: each for each in (without_events_and_splits, hanging, ending, closed)}[sys.argv[1]]()
    os._exit(device_checks.main(sys.argv[2:]))
