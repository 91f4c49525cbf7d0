"""Traces the results of every operator of a vLLM engine for one sample, token by token.

PyTorch's dispatch mode sees each operator that the engine calls while it runs without graphs. The trace keeps the rows
of one sample from each result, under the token's position in the sample. So the same token is found again when the
sample is beside others, at another place in the batch, or computed in chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ENGINE_NAMESPACES = ("vllm",)
"""Namespaces of composite operators; the operators that they call are traced instead."""
COMPOSITES = ("aten.linear.default", "npu.npu_grouped_matmul.default")
"""Operators that the batch-invariant mode computes by others, see `verl_plugin.rollout.invariant_products`."""
_OUTSIDE = "outside of any layer"
_SORTS = (
    "_C_ascend.npu_moe_init_routing_custom.default", "npu.npu_moe_init_routing_v2.default",
    "npu.npu_moe_token_permute.default",
)  # fmt: skip
"""Operators that sort tokens by expert. Their second result has the row of each token and expert, [tokens x experts of
a token]; negative where the expert is on another rank."""
_UNSORTS, _SELECTS = "npu.npu_moe_token_unpermute.default", "aten.index_select.default"
_DEVICE = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

Replacement = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Place:
    """Identifies one result of an operator, in the same way in all runs.

    Attributes:
        layer: name in the model of the module whose forward runs.
        operator: PyTorch's name, such as `aten.mm.default`.
        call: number of times that the layer called it before in this forward.
        result: index of the result.
    """

    layer: str
    operator: str
    call: int
    result: int

    def sentence(self) -> str:
        """Return operator and layer in words."""
        return f"{self.operator} in {self.layer}"


@dataclass(frozen=True)
class Seen:
    """An operator's result for one token.

    Attributes:
        order: number of the call in its forward.
        row: the token's part of the result, on the host.
        given: shapes of the operator's input tensors.
    """

    order: int
    row: torch.Tensor
    given: tuple[tuple[int, ...], ...]


Trace = dict[int, dict[Place, Seen]]
"""Results by position of the token in the sample."""


@dataclass(frozen=True)
class Rows:
    """The sample's rows in a forward.

    Attributes:
        tokens: number of rows of the forward's tensors, one for each token of the batch, padding included.
        requests: number of requests, which is the number of rows after the model.
        places: row and position of each token of the sample.
        request: the sample's row after the model; None if no token is sampled for it in this step.
        gathered: number of rows where the tokens of all data-parallel engines are gathered for the experts; 0 for one
            engine.
        first: first row of this engine there.
    """

    tokens: int
    requests: int
    places: tuple[tuple[int, int], ...]
    request: int | None
    gathered: int = 0
    first: int = 0


class OperatorTrace(TorchDispatchMode):
    """Dispatch mode that keeps the operators' results for the sample in each forward that `at` announces.

    Args:
        replacements: by operator, the function that is called in its place.
    """

    def __init__(self, replacements: Mapping[str, Replacement] | None = None) -> None:
        super().__init__()
        self.trace: Trace = {}
        self.replacements = dict(replacements or {})
        self._rows: Rows | None = None
        self._behind = False
        self._sorted: list[list[int]] | None = None  # rows by token, between sorting tokens by expert and the reverse
        self._layers: list[str] = []
        self._calls: Counter[tuple[str, str]] = Counter()
        self._order = 0

    def at(self, rows: Rows | None) -> None:
        """Begin a forward in which the sample has these rows; None if the sample is not in the forward."""
        self._rows, self._behind, self._order, self._sorted = rows, False, 0, None
        self._calls.clear()

    def behind_the_model(self) -> None:
        """Note that the model has finished: from now on tensors have one row for each request."""
        self._behind = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator or its replacement, and keep the sample's rows."""
        kwargs = kwargs or {}
        if func.namespace in ENGINE_NAMESPACES:
            with self:  # straight to the kernel, which is Python: a call by name would be dispatched here again
                return func.redispatch(_DEVICE, *args, **kwargs)
        name = str(func)
        replaced = self.replacements.get(name)
        results = func(*args, **kwargs) if replaced is None else replaced(func, args, kwargs)
        if self._rows is not None and not is_view(func):
            if func.namespace == "c10d":
                torch.npu.synchronize()  # a collective writes its result on a stream of its own
            self._follow_sort(name, results)
            self._keep(name, func, args, kwargs, results)
        return results

    def _follow_sort(self, name: str, results: Any) -> None:
        """Note where the rows of tokens are from now on."""
        assert self._rows is not None
        if name in _SORTS:
            self._sorted = results[1].view(self._rows.gathered or self._rows.tokens, -1).tolist()
        elif name == _UNSORTS:
            self._sorted = None
        elif name == _SELECTS and self._sorted is not None:
            # `ordered_experts` puts rows back before it adds them up.
            tokens, chosen = len(self._sorted), len(self._sorted[0])
            if len(results) == tokens * chosen:
                self._sorted = [[*range(each * chosen, (each + 1) * chosen)] for each in range(tokens)]

    def _keep(self, name: str, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        layer = self._layers[-1] if self._layers else _OUTSIDE
        call = self._calls[layer, name]
        self._calls[layer, name] += 1
        self._order += 1
        shapes = tuple(tuple(each.shape) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
        if not shapes or "empty" in name:
            return  # no input tensor, or uninitialised memory: nothing was computed from the sample
        # A sort's other results are whole numbers, and scales that only quantised rows have.
        made = [results[0]] if name in _SORTS else [*tree_leaves(results), *written(func, args, kwargs)]
        for number, tensor in enumerate(made):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                for position, row in self._rows_of(tensor):
                    seen = Seen(self._order, row.detach().cpu().clone(), shapes)
                    self.trace.setdefault(position, {})[Place(layer, name, call, number)] = seen

    def _rows_of(self, tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield position and part of each token of the sample; nothing if the tensor's rows are not the tokens'."""
        rows = self._rows
        assert rows is not None
        if self._behind:
            if rows.request is not None and tensor.dim() and tensor.shape[0] == rows.requests:
                yield rows.places[-1][1], tensor[rows.request]
        elif tensor.dim():
            for row, position in rows.places:
                part = self._part_of(tensor, row)
                if part is not None:
                    yield position, part

    def _part_of(self, tensor: torch.Tensor, row: int) -> torch.Tensor | None:
        """Return the part of a token of this rank, whose rows were sorted by expert or gathered from all ranks."""
        rows = self._rows
        assert rows is not None
        if self._sorted is not None and tensor.shape[0] == len(self._sorted) * len(self._sorted[0]):
            return tensor[[each for each in self._sorted[rows.first + row] if each >= 0]]
        if tensor.shape[0] == rows.tokens:
            return tensor[row]
        return tensor[rows.first + row] if 0 < tensor.shape[0] == rows.gathered else None

    @contextmanager
    def following(self, model: torch.nn.Module) -> Iterator[None]:
        """Track the layer whose forward runs."""
        handles = []
        for name, layer in model.named_modules():
            handles.append(layer.register_forward_pre_hook(self._enter(name)))
            handles.append(layer.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Any:
        def enter(*_: Any) -> None:
            self._layers.append(name or "the model")

        return enter

    def _leave(self, *_: Any) -> None:
        if self._layers:
            self._layers.pop()


class OperatorCount(TorchDispatchMode):
    """Dispatch mode that counts the operators which compute something, also inside replacements written in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator, and count it."""
        kwargs = kwargs or {}
        name = str(func)
        if func.namespace not in ENGINE_NAMESPACES and name not in COMPOSITES:
            if not is_view(func) and "empty" not in name:
                self.calls[name] += 1
            return func(*args, **kwargs)
        inside = OperatorCount()
        with inside:
            results = func.redispatch(_DEVICE, *args, **kwargs)
        is_replaced = any(each.startswith("batch_invariant_ops") for each in inside.calls)
        # A kernel of CANN is one call, whatever torch_npu prepares for it.
        self.calls.update(inside.calls if is_replaced or func.namespace in ENGINE_NAMESPACES else [name])
        return results


@cache
def is_view(func: Any) -> bool:
    """Return whether an operator only returns views of its inputs, as `view` and `t` do: it computes nothing."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the tensors that an operator without results has written to."""
    if func._schema.returns:
        return []
    named = [(each, args[place] if place < len(args) else kwargs.get(each.name))
             for place, each in enumerate(func._schema.arguments)]  # fmt: skip
    return tree_leaves([value for each, value in named if each.alias_info is not None and each.alias_info.is_write])


def one_row_at_a_time(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator for each row of its first tensor, and concatenate the results.

    Other tensors with as many dimensions and rows are divided with it. Not for operators that write to their inputs.
    """
    first = next(each for each in tree_leaves((args, dict(kwargs))) if isinstance(each, torch.Tensor))
    count = first.shape[0]

    def row(value: Any, number: int) -> Any:
        is_divided = isinstance(value, torch.Tensor) and value.dim() == first.dim() and value.shape[0] == count
        return value[number : number + 1] if is_divided else value

    parts = [
        func(*[row(each, number) for each in args], **{name: row(each, number) for name, each in kwargs.items()})
        for number in range(count)
    ]
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    return tuple(torch.cat(list(each)) for each in zip(*parts, strict=True))
