"""How an operator is declared, and how it runs: on host tensors that share the memory of the NPU tensors."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import _C

_libraries: dict[str, torch.library.Library] = {}
_emulated: dict[str, "Operator"] = {}


@dataclass(frozen=True)
class Operator:
    """One emulated operator: its full name ("npu::npu_swiglu"), its schema and the function on host tensors."""

    name: str
    schema: str
    function: Callable
    differentiable: bool


def operator(schema: str, namespace: str = "npu", differentiable: bool = False) -> Callable[[Callable], Callable]:
    """Register the decorated function, which takes and returns host tensors, as an operator of the NPU.

    What it allocates is charged to the device. It may write to arguments that the schema marks as written. If
    `differentiable`, its gradient is that of the torch operators it is made of.
    """

    def register(function: Callable) -> Callable:
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        library = _libraries[namespace]
        library.define(schema)
        base = schema.split("(")[0].strip()
        described = Operator(f"{namespace}::{base}", schema, function, differentiable)
        _emulated[described.name] = described
        library.impl(base, functools.partial(run_on_host, described), "PrivateUse1")
        if differentiable:
            library.impl(base, functools.partial(_run_with_gradient, described), "AutogradPrivateUse1")
        return function

    return register


def emulated() -> dict[str, Operator]:
    """Every emulated operator, by full name."""
    return dict(_emulated)


def exposed(namespace: str) -> dict[str, Callable]:
    """The callable operators of a namespace, by short name."""
    operators = getattr(torch.ops, namespace)
    names = {name.split("::")[1].split(".")[0] for name in _emulated if name.startswith(namespace + "::")}
    return {name: getattr(operators, name) for name in names}


class _HostCall:
    """The arguments and results of one call, on their way between the device and the host."""

    def __init__(self):
        self.aliases = _C.HostAliases()
        self.device: int | None = None

    def to_host(self, value):
        if isinstance(value, torch.Tensor):
            if value.device.type != "npu":
                return value
            if self.device is None:
                self.device = value.device.index
            return self.aliases.alias(value)
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return [self.to_host(item) for item in value]
        return value

    def to_device(self, value):
        if isinstance(value, torch.Tensor):
            return self.aliases.to_device(value, self.device)
        if isinstance(value, tuple):
            return tuple([self.to_device(item) for item in value])
        if isinstance(value, list):
            return [self.to_device(item) for item in value]
        return value

    def run(self, function: Callable, args, kwargs):
        outer = _C.exchange_charged_device(_C.current_device() if self.device is None else self.device)
        try:
            return function(*args, **kwargs)
        finally:
            _C.exchange_charged_device(outer)


def run_on_host(operator: Operator, *args, **kwargs):
    """Run an operator on NPU tensors."""
    _C.count_operator(operator.name)
    call = _HostCall()
    args = [call.to_host(value) for value in args]
    kwargs = {name: call.to_host(value) for name, value in kwargs.items()}
    if call.device is None:
        call.device = _C.current_device()
    return call.to_device(call.run(operator.function, args, kwargs))


def _tensors_in(args, kwargs):
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, torch.Tensor))


def _run_with_gradient(operator: Operator, *args, **kwargs):
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors_in(args, kwargs)):
        return _HostGraph.apply(operator, kwargs, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return run_on_host(operator, *args, **kwargs)


class _HostGraph(torch.autograd.Function):
    """Records the operator's torch operators on the host in forward, and walks that graph in backward."""

    @staticmethod
    def forward(ctx, operator: Operator, kwargs, *args):
        _C.count_operator(operator.name)
        call = _HostCall()
        leaves = []

        def to_leaf(value):
            host = call.to_host(value)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                host = host.detach().requires_grad_()
                leaves.append(host)
            else:
                leaves.append(None)
            return host

        args = [to_leaf(value) for value in args]
        kwargs = {name: call.to_host(value) for name, value in kwargs.items()}
        with torch.enable_grad():
            results = call.run(operator.function, args, kwargs)
        ctx.operator, ctx.leaves, ctx.device = operator, leaves, call.device
        ctx.results = results if isinstance(results, tuple) else (results,)
        detached = tuple(call.to_device(_detached(result)) for result in ctx.results)
        ctx.mark_non_differentiable(
            *(
                made
                for made, result in zip(detached, ctx.results)
                if isinstance(made, torch.Tensor) and not result.requires_grad
            )
        )
        return detached if isinstance(results, tuple) else detached[0]

    @staticmethod
    def backward(ctx, *gradients):
        _C.count_operator(ctx.operator.name + "_backward")
        call = _HostCall()
        call.device = ctx.device
        wanted = [(result, call.to_host(gradient)) for result, gradient in zip(ctx.results, gradients)
                  if isinstance(result, torch.Tensor) and result.requires_grad and gradient is not None]  # fmt: skip
        leaves = [leaf for leaf in ctx.leaves if leaf is not None]
        results, incoming = zip(*wanted)

        def differentiate():
            return torch.autograd.grad(results, leaves, incoming, allow_unused=True)

        found = iter(call.to_device(call.run(differentiate, (), {})))
        ctx.results = None  # frees what the graph held
        return (None, None, *(None if leaf is None else next(found) for leaf in ctx.leaves))


def _detached(value):
    return value.detach() if isinstance(value, torch.Tensor) else value
