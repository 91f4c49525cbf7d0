"""verl's vLLM servers of an instance over several nodes, whose engines may have an executor of this project's.

verl 0.9.1 tells vLLM how many nodes an instance has (`nnodes`), and vLLM 0.23 then takes no executor but its own. vLLM
needs the number for an engine that spans nodes. Where each engine has all its dies on one node, as `--check` demands
of a job with several engines, it starts the engines of the other nodes without: each node has the number and the first
rank of its engines, and the address of the first node (vLLM's documents: data-parallel deployment over nodes).
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from verl_plugin.rollout.sync_window import EXECUTOR


class WindowServer(vLLMHttpServer):
    """verl's server. Without sync windows it is upstream's."""

    async def run_server(self, args: Namespace) -> None:
        """As upstream, on the first node of an instance."""
        await super().run_server(without_nodes(args))

    async def run_headless(self, args: Namespace) -> None:
        """As upstream, on each of the other nodes."""
        await super().run_headless(without_nodes(args))


class WindowReplica(vLLMReplica):
    """verl's replica, with that server."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.server_class = ray.remote(WindowServer)


def without_nodes(args: Namespace) -> Namespace:
    """vLLM's arguments for the engines of one node, where their executor is this project's.

    Args:
        args: as verl makes them. Engines of a node are told apart from those of others by
            `data_parallel_start_rank` and `data_parallel_size_local`, not by `node_rank`.
    """
    if args.distributed_executor_backend != EXECUTOR or args.nnodes == 1:
        return args
    return Namespace(**{**vars(args), "nnodes": 1, "node_rank": 0})
