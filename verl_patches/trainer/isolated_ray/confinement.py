"""Confines a worker of an isolated local Ray: torch's stores listen on loopback, shared memory is named by its run."""

from __future__ import annotations

import functools
import importlib
import ipaddress
import secrets
import socket
import tempfile
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from verl_patches.trainer.isolated_ray.folder import shared_memory_prefix


def confine_worker() -> None:
    """Make torch's stores of this process listen on loopback only, if that is their address."""
    # Not by an import statement: the package has a function of the same name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous.TCPStore = listening_at_its_address(rendezvous.TCPStore)


def name_shared_memory() -> None:
    """Name shared memory that this process makes after its run, which removes it at the end.

    Ray kills a worker together with Python's tracker of its shared memory, so nobody else would remove it. The name
    comes from the folder for temporary files, which each run has to itself.
    """
    prefix = f"/{shared_memory_prefix(Path(tempfile.gettempdir()))}"
    vars(shared_memory)["_make_filename"] = lambda: prefix + secrets.token_hex(4)


def listening_at_its_address(store: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's TCPStore so that it listens on loopback only, if its address is a loopback address.

    Torch's server listens on all interfaces, whatever its address, but accepts a socket that already listens.
    """

    @functools.wraps(store, updated=())
    def make(
        host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *rest: Any, **options: Any
    ) -> Any:
        if is_master and len(rest) < 4 and options.get("master_listen_fd") is None and _is_loopback(host_name):
            listener = _listen(host_name, port)
            if listener is not None:
                port = listener.getsockname()[1]
                # Torch 2.5 rejects such a socket with libuv; the other server speaks the same protocol.
                options |= {"master_listen_fd": listener.detach(), "use_libuv": False}
        return store(host_name, port, world_size, is_master, *rest, **options)

    return make


def _is_loopback(host_name: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host_name)).is_loopback
    except OSError:
        return False


def _listen(host_name: str, port: int) -> socket.socket | None:
    """Open a listening socket; None if the port is taken, maybe by a store of this process, which torch then shares."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((socket.gethostbyname(host_name), port))
        server.listen(socket.SOMAXCONN)
    except OSError:
        server.close()
        return None
    server.setblocking(False)
    return server
