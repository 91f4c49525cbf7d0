"""The backend of torch.compile: Dynamo captures a graph as for the real one, and the graph runs node by node."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule

from .configuration import CompilerConfig


def get_npu_backend(
    *, compiler_config: CompilerConfig | None = None, custom_decompositions: dict | None = None
) -> Callable[[GraphModule, Sequence], Callable]:
    """What to hand to ``torch.compile(backend=...)``.

    The graph engine is not there: options of the compiler and decompositions are accepted and have no effect.
    """
    return functools.partial(compile_graph, compiler_config or CompilerConfig(), custom_decompositions or {})


def compile_graph(config: CompilerConfig, decompositions: dict, graph: GraphModule, inputs: Sequence) -> Callable:
    """The graph as a function. RuntimeError if its scopes are not nested properly."""
    check_scopes(graph)
    return graph.forward


def check_scopes(graph: GraphModule) -> None:
    """Raise RuntimeError where a scope is left that was not entered, or entered and not left."""
    depth = 0
    for node in graph.graph.nodes:
        depth += (node.target == torch.ops.air.scope_enter) - (node.target == torch.ops.air.scope_exit)
        if depth < 0:
            raise RuntimeError(f"torchair: {node.name} leaves a scope that was not entered")
    if depth:
        raise RuntimeError(f"torchair: {depth} scopes are entered and not left")
