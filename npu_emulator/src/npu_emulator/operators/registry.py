"""How an operator is declared, and how it runs: on host tensors that share the memory of the NPU tensors."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._subclasses import FakeTensor

from .. import _C, strict

_libraries: dict[str, torch.library.Library] = {}
_emulated: dict[str, "Operator"] = {}


@dataclass(frozen=True)
class Operator:
    """One emulated operator: its full name ("npu::npu_swiglu"), its schema and the function on host tensors."""

    name: str
    schema: str
    function: Callable
    differentiable: bool
    on_device: bool = False

    @functools.cached_property
    def parameters(self) -> dict[str, str]:
        """The function's own name for each argument of the schema."""
        own = self.function.__code__.co_varnames[: self.function.__code__.co_argcount]
        arguments = torch._C.parse_schema(self.schema).arguments
        positional = (argument.name for argument in arguments if not argument.kwarg_only)
        return dict(zip(positional, own, strict=True))

    @functools.cached_property
    def written(self) -> dict[int | str, bool]:
        """Which arguments it writes to, by position and by either name."""
        arguments = torch._C.parse_schema(self.schema).arguments
        marked = {}
        for position, argument in enumerate(arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                marked |= dict.fromkeys((position, argument.name, self.parameters.get(argument.name)), True)
        return marked


def operator(
    schema: str,
    namespace: str = "npu",
    differentiable: bool = False,
    shapes: Callable | None = None,
    on_device: bool = False,
) -> Callable[[Callable], Callable]:
    """Register the decorated function, which takes and returns host tensors, as an operator of the NPU.

    What it allocates is charged to the device. It may write to arguments that the schema marks as written. If
    `differentiable`, its gradient is that of the torch operators it is made of. `shapes` takes the same arguments
    and returns empty results of the right shapes, for graphs; by default that is the function itself, which will do
    unless it looks at values. One that works `on_device` gets the tensors of the NPU themselves, to hand them to
    torch.distributed or to mark their memory.
    """

    def register(function: Callable) -> Callable:
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        library = _libraries[namespace]
        library.define(schema)
        base = schema.split("(")[0].strip()
        described = Operator(f"{namespace}::{base}", schema, function, differentiable, on_device)
        _emulated[described.name] = described
        library.impl(base, functools.partial(run_on_host, described), "PrivateUse1")
        torch.library.register_fake(described.name, shapes or function, lib=library)
        if differentiable:
            library.impl(base, functools.partial(_run_dispatched, described), "AutogradPrivateUse1")
        return function

    return register


def emulated() -> dict[str, Operator]:
    """Every emulated operator, by full name."""
    return dict(_emulated)


def exposed(namespace: str) -> dict[str, Callable]:
    """The callable operators of a namespace, by short name."""
    return {
        name.split("::")[1].split(".")[0]: _callable(described)
        for name, described in _emulated.items()
        if name.startswith(namespace + "::")
    }


def _callable(operator: Operator) -> Callable:
    """The operator as a function. It calls what the dispatcher would call, unless something watches the dispatcher."""
    namespace, name = operator.name.split("::")
    dispatched = getattr(getattr(torch.ops, namespace), name.split(".")[0])
    run = _run_with_gradient if operator.differentiable else run_on_host

    def call(*args, **kwargs):
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return dispatched(*args, **kwargs)
        if kwargs:
            kwargs = {operator.parameters.get(name, name): value for name, value in kwargs.items()}
        return run(operator, *args, **kwargs)

    call.__name__ = call.__qualname__ = name.split(".")[0]
    call.__doc__ = f"{operator.schema}\n\n{operator.function.__doc__ or ''}"
    return call


def run_on_host(operator: Operator, *args, **kwargs):
    """Run an operator on NPU tensors; one that works on the device takes them as they are."""
    _C.count_operator(operator.name)
    if operator.on_device:
        if strict.is_enabled():
            strict.check(operator.name, operator.function, args, kwargs)
        with torch.set_grad_enabled(operator.differentiable and torch.is_grad_enabled()):
            return operator.function(*args, **kwargs)
    if _C.is_recording() and operator.written:
        named = [*enumerate(args), *kwargs.items()]
        _C.will_write([value for name, value in named if name in operator.written and value is not None])
    return _C.call_on_host(operator.name, _host_function(operator), args, kwargs, bool(operator.written))


def _host_function(operator: Operator) -> Callable:
    """What runs on host tensors; in strict mode it looks at its arguments first, at their elements too."""
    return strict.checked(operator.name, operator.function) if strict.is_enabled() else operator.function


def _run_with_gradient(operator: Operator, *args, **kwargs):
    if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
        if operator.on_device:
            return run_on_host(operator, *args, **kwargs)
        return _HostGraph.apply(operator, kwargs, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return run_on_host(operator, *args, **kwargs)


def _run_dispatched(operator: Operator, *args, **kwargs):
    """What the dispatcher calls. While a graph is captured tensors have no memory: only their shapes are asked for."""
    if not any(isinstance(value, FakeTensor) for value in args):
        return _run_with_gradient(operator, *args, **kwargs)
    namespace, name = operator.name.split("::")
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(getattr(torch.ops, namespace), name)(*args, **kwargs)


class _HostGraph(torch.autograd.Function):
    """Records the operator's torch operators on the host in forward, and walks that graph in backward."""

    @staticmethod
    def forward(ctx, operator: Operator, kwargs, *args):
        _C.count_operator(operator.name)
        ctx.operator, function = operator, _host_function(operator)
        wanted = [isinstance(value, torch.Tensor) and value.requires_grad for value in args]

        def record(*args, **kwargs):
            args = [
                value.detach().requires_grad_() if leaf else value for value, leaf in zip(args, wanted, strict=True)
            ]
            with torch.enable_grad():
                results = function(*args, **kwargs)
            ctx.leaves = [value if leaf else None for value, leaf in zip(args, wanted, strict=True)]
            ctx.results = results if isinstance(results, tuple) else (results,)
            return tuple(_detached(result) for result in ctx.results)

        results = _C.call_on_host(operator.name, record, args, kwargs)
        ctx.mark_non_differentiable(*(made for made, of in zip(results, ctx.results, strict=True) if _is_constant(of)))
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx, *gradients):
        _C.count_operator(ctx.operator.name + "_backward")

        def differentiate(*gradients):
            pairs = [
                (result, gradient)
                for result, gradient in zip(ctx.results, gradients, strict=True)
                if isinstance(result, torch.Tensor) and result.requires_grad and gradient is not None
            ]
            results, incoming = zip(*pairs, strict=True)
            leaves = [leaf for leaf in ctx.leaves if leaf is not None]
            return torch.autograd.grad(results, leaves, incoming, allow_unused=True)

        found = iter(_C.call_on_host(ctx.operator.name + "_backward", differentiate, gradients))
        ctx.results = None  # frees what the graph held
        return (None, None, *(None if leaf is None else next(found) for leaf in ctx.leaves))


def _detached(value):
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is_constant(value) -> bool:
    return isinstance(value, torch.Tensor) and not value.requires_grad
