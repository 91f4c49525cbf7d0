"""Stand-in for torchair, the graph compiler for the NPU."""

from . import ge, inference, ops, scope  # noqa: F401
from .backend import get_npu_backend  # noqa: F401
from .configuration import CompilerConfig  # noqa: F401


def patch_for_hcom() -> None:
    """Collectives need no preparation for graphs here."""


def register_fx_node_ge_converter(operator):
    """Conversion to the graph engine is not used; the converter is accepted and left alone."""
    return lambda converter: converter
