"""Ports at which processes of this machine meet, seconds after they were chosen.

A port that is free now may belong to another process by then. vLLM's data-parallel engines are given one port and use
the next ones too. If one of them is taken, the engine that listens skips it, and the others wait there for half an
hour.
"""

from __future__ import annotations

import random
import socket

# Below the ports that Linux gives to connections (from 32768), and above those of Ray's workers (to 19999).
_FIRST, _END = 20000, 32768
_BLOCK = 8
_ATTEMPTS = 200
_kept: list[socket.socket] = []  # the last port of each block stays bound until the process ends


def reserve_ports(address: str = "127.0.0.1") -> int:
    """Return the first of seven ports in a row that are free on an address of this machine.

    No other caller of this function gets them until this process ends.

    Raises:
        OSError: no such ports were found.
    """
    blocks = random.SystemRandom()  # programs seed the other generator, and would all try the same ones
    for _ in range(_ATTEMPTS):
        first = blocks.randrange(_FIRST, _END, _BLOCK)
        *others, last = range(first, first + _BLOCK)
        guard = _bound(address, last)
        if guard is None:
            continue
        probes = [_bound(address, port) for port in others]
        for probe in probes:
            if probe is not None:
                probe.close()
        if None not in probes:
            _kept.append(guard)
            return first
        guard.close()
    raise OSError(f"no {_BLOCK} ports in a row are free from {_FIRST} to {_END - 1}. End the processes that use them.")


def _bound(address: str, port: int) -> socket.socket | None:
    """Return a socket bound to a port, or None if the port is taken."""
    found = socket.socket()
    try:
        found.bind((address, port))
    except OSError:
        found.close()
        return None
    return found
