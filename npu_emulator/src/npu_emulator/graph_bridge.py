"""Runs torchair's graphs node by node, since there is no graph engine (GE).

The wheel's torchair does its whole part: AOTAutograd, its decompositions and passes, and the conversion of every node
into GE's protobuf, so that a node without a converter is rejected as on an NPU. The graph that it would then hand to GE
runs eagerly instead, by its own option ``debug.run_eagerly``. Its mode ``reduce-overhead``, which captures ACL graphs,
is unchanged.
"""

from types import ModuleType

import torch


def install(compiler: ModuleType) -> None:
    """Make torchair's module ``npu_fx_compiler`` stop before the graph engine."""
    generate = compiler._NpuFxCompiler._gen_compiled_gm

    def generate_in_front_of_ge(self, graph, example_inputs):
        if self.config.mode.value != "max-autotune":
            return generate(self, graph, example_inputs)
        self.config.debug.run_eagerly = True
        return with_tensors_in_order(without_schedule(generate(self, graph, example_inputs)))

    compiler._NpuFxCompiler._gen_compiled_gm = generate_in_front_of_ge


def without_schedule(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Remove the nodes that only tell GE where and when to run others: scopes, and waits for a tensor.

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
        raise RuntimeError(f"torchair: {depth} scopes are entered but not left")
    graph.recompile()
    return graph


def with_tensors_in_order(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Make every tensor that an operator of torch_npu reads contiguous, by a copy if it is not.

    GE's tensors have shapes and no strides, so that its kernels never see a view. Tensors that an operator writes stay
    as they are.
    """
    contiguous = torch.ops.aten.contiguous.default
    for node in list(graph.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "npu":
            continue
        written = {each.name for each in node.target._schema.arguments if each.alias_info and each.alias_info.is_write}
        names = [each.name for each in node.target._schema.arguments]

        def in_order(given: torch.fx.Node) -> torch.fx.Node:
            is_tensor = isinstance(given.meta.get("val"), torch.Tensor)
            return graph.graph.call_function(contiguous, (given,)) if is_tensor else given

        def of_argument(name: str, given: object, written: set[str] = written) -> object:
            return given if name in written else torch.fx.node.map_arg(given, in_order)

        with graph.graph.inserting_before(node):
            node.args = tuple(map(of_argument, names, node.args))
            node.kwargs = {name: of_argument(name, given) for name, given in node.kwargs.items()}
    graph.recompile()
    return graph
