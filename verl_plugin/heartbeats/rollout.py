"""verl's vLLM server with heartbeats: every output of every request counts as progress."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from post_training.hang_detection.signs import process_signs
from verl_plugin.heartbeats.sending import start
from verl_plugin.rollout.servers import WindowServer

ROLLOUT = "rollout"


class CountedRequests:
    """Replaces `AsyncLLM.generate`. The process is in the phase `rollout` while requests are running.

    Args:
        generate: vLLM's.
    """

    def __init__(self, generate: Callable[..., AsyncIterator[Any]]) -> None:
        self._generate, self._running, self._phase = generate, 0, ExitStack()

    async def __call__(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        """As upstream: yield an output each time that vLLM has decoded further."""
        if not self._running:
            self._phase.enter_context(process_signs().phase(ROLLOUT))
        self._running += 1
        try:
            async for output in self._generate(*arguments, **named):
                process_signs().progress()
                yield output
        finally:
            self._running -= 1
            if not self._running:
                self._phase.close()


class HeartbeatServer(WindowServer):
    """verl's server with heartbeats, and with sync windows if its engines have them."""

    async def run_server(self, *arguments: Any, **named: Any) -> None:
        """As upstream."""
        start(f"{ROLLOUT} {self.replica_rank}")
        await super().run_server(*arguments, **named)
        self.engine.generate = CountedRequests(self.engine.generate)


class HeartbeatReplica(vLLMReplica):
    """verl's replica, which starts `HeartbeatServer`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.server_class = ray.remote(HeartbeatServer)
