"""The jobs of the search for operators that depend on the batch, as its engines get them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One engine.

    Attributes:
        model: folder of HuggingFace's.
        dtype: of weights and activations.
        graph: vLLM's cudagraph_mode, or "eager".
        sizes: numbers of tokens that graphs are captured for.
        search: look for operators that depend on the batch; without graphs alone.
        planted: module whose import changes an operator, for the test of the search.
    """

    model: str
    dtype: str = "float32"
    graph: str = "eager"
    sizes: tuple[int, ...] = ()
    search: bool = True
    planted: str = ""
