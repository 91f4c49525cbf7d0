#!/usr/bin/env python3
"""Serve the report of one run on loopback until Ctrl-C: `watch_run.py RUN PORT`; port 0 takes a free one."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from post_training.report import ReportError  # noqa: E402
from post_training.report.run_page import missing_part, render_page  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402

_LOOPBACK = "127.0.0.1"
# Files from which a run's page is made.
_PARTS = ("*.json", "*.jsonl", "*.yaml", "memory/*.json", "meters/*.json")


class NotBegun(Exception):
    """There is nothing to show yet; the message names what the page waits for."""


class RunServer(ThreadingHTTPServer):
    """The page of the run in `folder` at /, and nothing else; it is rendered when the run has written something."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__((_LOOPBACK, port), _Handler)
        self._folder = folder
        self._rendered: tuple[object, bytes] = (None, b"")

    @property
    def names(self) -> set[str]:
        """Host names under which a browser on this machine may address the server; others are another site's."""
        return {f"{host}:{self.server_port}" for host in (_LOOPBACK, "localhost")}

    def page(self) -> bytes:
        """Return the current page.

        Raises:
            NotBegun: the run has no step yet.
            ReportError: a file of the run cannot be read.
        """
        if missing := missing_part(self._folder):
            raise NotBegun(f"Waiting for the first step of {self._folder}: {missing}.")
        files = sorted(file for part in _PARTS for file in self._folder.glob(part))
        seen = [(file, status.st_mtime_ns, status.st_size) for file in files if (status := _status(file))]
        if self._rendered[0] != seen:
            self._rendered = (seen, render_page(self._folder, live=True).encode())
        return self._rendered[1]


class _Handler(BaseHTTPRequestHandler):
    server: RunServer

    def do_GET(self) -> None:
        """Answer / for a browser of this machine."""
        if self.headers.get("Host") not in self.server.names:
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            try:
                status, page = HTTPStatus.OK, self.server.page()
            except NotBegun as waiting:
                status, page = HTTPStatus.OK, _waiting(str(waiting))
            except ReportError as error:  # a file that the run may be writing at this moment
                status, page = HTTPStatus.SERVICE_UNAVAILABLE, _waiting(str(error))
            self._answer(status, page)

    def _answer(self, status: HTTPStatus, page: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the terminal shows the address."""


def _status(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except FileNotFoundError:  # replaced at this moment
        return None


def _waiting(sentence: str) -> bytes:
    head = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="3"><title>Run</title>'
    )
    return f"{head}<p>{escape(sentence)}</p></html>".encode()


def main() -> int:
    """Serve until Ctrl-C; returns the exit code."""
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    try:
        server = RunServer(folder, port)
    except OSError as error:
        print(
            f"error: port {port} of {_LOOPBACK} cannot be used ({error.strerror}). Set another --port", file=sys.stderr
        )
        return 2
    print(f"{folder}: http://{_LOOPBACK}:{server.server_port}/ (Ctrl-C ends)", flush=True)
    with server, suppress(KeyboardInterrupt):
        with suppress(ReportError):  # the page names the file
            if missing := missing_part(folder):
                print(f"Waiting for the first step: {missing}. The page then shows the run.", flush=True)
        server.serve_forever()
    return 0


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
