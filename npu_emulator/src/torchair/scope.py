"""Scopes of a graph: they place work on streams. Here all work is in order already, so they only leave their marks.

A real graph engine keeps the order of data by itself and of the rest by `npu_wait_tensor`; results are the same with
and without scopes.
"""

import torch
from torch import Tensor

_library = torch.library.Library("air", "FRAGMENT")
_library.define("scope_enter(str[] keys, str[] values) -> ()")
_library.define("scope_exit() -> ()")
_library.define("wait_tensor(Tensor(a) self, Tensor dependency) -> Tensor(a)")


def _mark(*_) -> None:
    """A mark in the graph, without effect."""


def _same(tensor: Tensor, dependency: Tensor) -> Tensor:
    return tensor.view_as(tensor)


for _name in ("scope_enter", "scope_exit"):
    _library.impl(_name, _mark, "CompositeExplicitAutograd")
    torch.library.register_fake(f"air::{_name}", _mark, lib=_library)
_library.impl("wait_tensor", _same, "CompositeImplicitAutograd")


class _Scope:
    """Between enter and exit, nodes of the graph carry attributes."""

    keys: list[str]
    values: list[str]

    def __enter__(self) -> None:
        torch.ops.air.scope_enter(self.keys, self.values)

    def __exit__(self, *_) -> None:
        torch.ops.air.scope_exit()


class npu_stream_switch(_Scope):
    """Work inside belongs to the stream of this name."""

    def __init__(self, stream_tag: str, stream_priority: int = 0):
        self.keys = ["_user_stream_label", "_user_stream_priority"]
        self.values = [stream_tag, str(stream_priority)]


class super_kernel(_Scope):
    """Work inside is fused to one kernel."""

    def __init__(self, scope: str, options: str = ""):
        self.keys = ["_super_kernel_scope", "_super_kernel_options"]
        self.values = [scope, options]


def npu_wait_tensor(self: Tensor, dependency: Tensor) -> Tensor:
    """`self`, once `dependency` has been computed."""
    return torch.ops.air.wait_tensor(self, dependency)
