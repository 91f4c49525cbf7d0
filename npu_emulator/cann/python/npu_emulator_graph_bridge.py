"""Runs torchair's graphs node by node, where there is no graph engine (GE).

The wheel's torchair does its whole part: AOTAutograd, its decompositions and passes, and the conversion of every node
into GE's protobuf, so that a node without a converter is refused as on an NPU. What it would then hand to GE, it runs
eagerly instead, by its own option ``debug.run_eagerly``. Its mode ``reduce-overhead``, which captures ACL graphs, is
left alone.
"""

from types import ModuleType

import torch


def install(compiler: ModuleType) -> None:
    """Let torchair's module ``npu_fx_compiler`` end in front of the graph engine."""
    generate = compiler._NpuFxCompiler._gen_compiled_gm

    def generate_in_front_of_ge(self, graph, example_inputs):
        if self.config.mode.value != "max-autotune":
            return generate(self, graph, example_inputs)
        self.config.debug.run_eagerly = True
        return without_schedule(generate(self, graph, example_inputs))

    compiler._NpuFxCompiler._gen_compiled_gm = generate_in_front_of_ge


def without_schedule(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph without the nodes that only tell GE where and when to run others: scopes, and waits for a tensor.

    torchair has no eager kernels for them, and nodes that run in the graph's order need none.

    Raises:
        RuntimeError: a scope is left that was not entered, or entered and not left.
    """
    depth = 0
    for node in list(graph.graph.nodes):
        name = node.target.name() if isinstance(node.target, torch._ops.OpOverload) else ""
        if name == "air::wait_tensor":
            node.replace_all_uses_with(node.args[0])
        elif name in ("air::scope_enter", "air::scope_exit"):
            depth += 1 if name == "air::scope_enter" else -1
            if depth < 0:
                raise RuntimeError(f"torchair: {node.name} leaves a scope that was not entered")
        else:
            continue
        graph.graph.erase_node(node)
    if depth:
        raise RuntimeError(f"torchair: {depth} scopes are entered and not left")
    graph.recompile()
    return graph
