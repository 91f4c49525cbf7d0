"""Job descriptions for the engines that search for operators that depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """The job of one engine.

    Attributes:
        model: HuggingFace folder.
        dtype: of weights and activations.
        graph: vLLM's cudagraph_mode, or "eager".
        sizes: numbers of tokens for which graphs are captured.
        search: look for operators that depend on the batch; only without graphs.
        engines: 2 for two data-parallel engines with experts on both, each in a process of its own.
        worker: vLLM's worker_cls; "" for vLLM-Ascend's own.
        planted: module whose import changes an operator, for the test of the search.
    """

    model: str
    dtype: str = "float32"
    graph: str = "eager"
    sizes: tuple[int, ...] = ()
    search: bool = True
    engines: int = 1
    worker: str = ""
    planted: str = ""
