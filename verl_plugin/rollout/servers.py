"""verl's vLLM servers with sync windows in an instance over several nodes.

verl 0.9.1 tells vLLM how many nodes an instance has (`nnodes`), and vLLM 0.23 then accepts no executor but its own.
vLLM needs that number only for an engine that spans nodes. With several engines `--check` requires that each has all
its dies on one node; vLLM then starts them without it, from the number and the first rank of a node's engines and the
address of the first node (vLLM's documents: data-parallel deployment over nodes).
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from verl_plugin.rollout.sync_window import EXECUTOR


class WindowServer(vLLMHttpServer):
    """verl's server with sync windows; without them it behaves as upstream's."""

    async def run_server(self, args: Namespace) -> None:
        """As upstream, on the first node of an instance."""
        await super().run_server(without_nodes(args))

    async def run_headless(self, args: Namespace) -> None:
        """As upstream, on each of the other nodes."""
        await super().run_headless(without_nodes(args))


class WindowReplica(vLLMReplica):
    """verl's replica, which starts `WindowServer`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.server_class = ray.remote(WindowServer)


def without_nodes(args: Namespace) -> Namespace:
    """Return vLLM's arguments with one node, if the executor is this project's.

    Args:
        args: as verl sets them. `data_parallel_start_rank` and `data_parallel_size_local` tell vLLM which engines are
            this node's, so `node_rank` is not needed.
    """
    if args.distributed_executor_backend != EXECUTOR or args.nnodes == 1:
        return args
    return Namespace(**{**vars(args), "nnodes": 1, "node_rank": 0})
