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
    """Run one worker through the template; returns its exit code, 128 + N after signal N, 1 without a template."""
    path, *argv = sys.argv[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(path)
            protocol.send_request(connection, argv, protocol.open_descriptors(connection.fileno()))
            return protocol.receive_exit_code(connection)
    except ConnectionError as error:
        sys.exit(f"error: the process that forks workers has ended ({error}). Its own error is printed before this one")


if __name__ == "__main__":
    sys.exit(main())
