"""Names of torchair's graph engine, for code that registers converters. No graph is ever made of them here."""

import enum


class DataType(enum.IntEnum):
    """Element types of the graph engine, with its numbers."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_BF16 = 27
    DT_INT4 = 29


class Tensor:
    """A value in a graph of the graph engine."""


class TensorSpec:
    """Type and shape of a value in a graph of the graph engine."""


def custom_op(op_type: str, *, inputs: dict | None = None, outputs=None, attrs: dict | None = None):
    raise NotImplementedError(f"torchair.ge.custom_op: graphs are not emulated, nor is {op_type} in them")
