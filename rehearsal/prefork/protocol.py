"""The messages between client and template: one length-prefixed JSON request with file descriptors, one answer.

Standard library only: the client is started once per worker without site-packages.
"""

import json
import os
import socket
import struct

_LENGTH = struct.Struct("!I")
STANDARD_STREAMS = 3
_MOST_DESCRIPTORS = 253  # that Linux hands over in one message


def open_descriptors(*others: int) -> list[int]:
    """Return this process's open descriptors without ``others``: standard streams, and those that its parent left."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        # The listing's own descriptor is closed by now.
        if number not in others and os.path.exists(f"/proc/self/fd/{name}"):
            found.append(number)
    return sorted({*range(STANDARD_STREAMS), *found})


def send_request(connection: socket.socket, argv: list[str], numbers: list[int]) -> None:
    """Send a command line, and this process's environment, directory and descriptors ``numbers``."""
    request = {"argv": argv, "environment": dict(os.environ), "directory": os.getcwd(), "descriptors": numbers}
    body = json.dumps(request).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(body))], numbers)
    connection.sendall(body)


def receive_request(connection: socket.socket) -> tuple[dict, list[int]]:
    """Receive a request of :func:`send_request`, and descriptors in the order of the request's ``descriptors``.

    Raises:
        ConnectionError: the client went away before the request was complete.
    """
    header, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_DESCRIPTORS)
    if len(header) < _LENGTH.size or len(streams) < STANDARD_STREAMS:
        for stream in streams:
            os.close(stream)
        raise ConnectionError("the worker's client closed the connection before sending its request")
    (remaining,) = _LENGTH.unpack(header)
    chunks: list[bytes] = []
    while remaining:
        chunk = connection.recv(remaining)
        if not chunk:
            for stream in streams:
                os.close(stream)
            raise ConnectionError("the worker's client closed the connection inside its request")
        chunks.append(chunk)
        remaining -= len(chunk)
    return json.loads(b"".join(chunks)), list(streams)


def send_exit_status(connection: socket.socket, status: int) -> None:
    """Tell the client how its worker ended (an exit code as ``os.waitstatus_to_exitcode`` gives it)."""
    connection.sendall(str(status).encode())


def receive_exit_code(connection: socket.socket) -> int:
    """Wait until the worker has ended; 128 + N if signal N ended it, 1 if the template itself went away."""
    status = int(connection.recv(16) or 1)
    return status if status >= 0 else 128 - status
