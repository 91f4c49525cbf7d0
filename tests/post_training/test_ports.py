"""Reserved ports, on an address that no other test uses."""

import os
import random
import socket
import subprocess
import sys

import pytest

from post_training import ports

ADDRESS = "127.71.83.2"


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Release the ports of a test when it ends."""
    monkeypatch.setattr(ports, "_kept", [])
    yield
    for guard in ports._kept:
        guard.close()


def are_free(numbers):
    """Return whether ports are free, also of servers of other tests that listen on every address."""
    found = [ports._bound(ADDRESS, number) for number in numbers]
    for each in filter(None, found):
        each.close()
    return None not in found


@pytest.fixture
def four_blocks(monkeypatch):
    """Restrict the range to four blocks, so that callers have to avoid each other's; return their first ports."""
    starts = range(ports._FIRST, ports._END - 4 * 8, 8)
    first = next(first for first in random.sample(starts, len(starts)) if are_free(range(first, first + 4 * 8)))
    monkeypatch.setattr(ports, "_FIRST", first)
    monkeypatch.setattr(ports, "_END", first + 4 * 8)
    return range(first, first + 4 * 8, 8)


def test_seven_ports_can_be_bound():
    first = ports.reserve_ports(ADDRESS)
    assert 20000 <= first and first + 8 <= 32768
    for port in range(first, first + 7):
        with socket.socket() as listener:
            listener.bind((ADDRESS, port))


def test_callers_get_different_ports_until_none_is_left(four_blocks):
    assert sorted(ports.reserve_ports(ADDRESS) for _ in four_blocks) == list(four_blocks)
    with pytest.raises(OSError, match=f"no 8 ports in a row are free from {four_blocks[0]} to"):
        ports.reserve_ports(ADDRESS)


def test_ports_in_use_are_avoided(four_blocks):
    """A block with one taken port is skipped, whichever port it is."""
    with socket.socket() as second, socket.socket() as seventh:
        second.bind((ADDRESS, four_blocks[0] + 1))
        seventh.bind((ADDRESS, four_blocks[2] + 6))
        assert {ports.reserve_ports(ADDRESS), ports.reserve_ports(ADDRESS)} == {four_blocks[1], four_blocks[3]}


def test_ports_are_free_again_when_their_process_ends(four_blocks):
    program = (
        "from post_training import ports\n"
        f"ports._FIRST, ports._END = {four_blocks[0]}, {four_blocks[-1] + 8}\n"
        f"print(*sorted(ports.reserve_ports({ADDRESS!r}) for _ in range(4)), flush=True)\n"
        "input()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as other:
        assert list(map(int, other.stdout.readline().split())) == list(four_blocks)
        with pytest.raises(OSError, match="no 8 ports in a row"):
            ports.reserve_ports(ADDRESS)
        other.communicate("\n")
    assert ports.reserve_ports(ADDRESS) in four_blocks
