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
        planted: module whose import changes an operator, for the test of the search.
    """

    model: str
    dtype: str = "float32"
    graph: str = "eager"
    sizes: tuple[int, ...] = ()
    search: bool = True
    planted: str = ""
