"""verl's adapter of a vLLM server on a training rank, with a socket of this job's own for weights."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout import ServerAdapter

from verl_plugin.alltoallv.addresses import own_handle
from verl_plugin.alltoallv.settings import EXTENSION


class OwnSocketAdapter(ServerAdapter):
    """Hands weights over where `AlltoallvExtension` waits for them, and to other workers where upstream's wait."""

    zmq_handle: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm = (self.config.engine_kwargs or {}).get("vllm") or {}
        if vllm.get("worker_extension_cls") == EXTENSION:
            self.zmq_handle = own_handle(self.zmq_handle)
