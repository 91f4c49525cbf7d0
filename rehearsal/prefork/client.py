"""Stand in for the Python executable of a Ray worker: ask the template to fork, stay until the worker ends.

Started by Ray as ``python -I -S client.py SOCKET default_worker.py --arguments...``. The process stays because the
raylet watches the process that it started.
"""

import os
import socket
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import protocol  # type: ignore[import-not-found]  # noqa: E402  (isolated start: no package, only this folder)


def main() -> int:
    """Run one worker through the template; returns its exit code, 128 + N when signal N ended it."""
    path, *argv = sys.argv[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        protocol.send_request(connection, argv)
        status = protocol.receive_exit_status(connection)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
