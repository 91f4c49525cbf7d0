"""A calculator that a model may call: exact arithmetic, bounded in size and time; it evaluates no Python.

An expression of at most `MOST_CHARACTERS` has at most as many operations, and no number in it may need more than
`MOST_BITS`, before or after each of them: that bounds the time as well.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

MOST_CHARACTERS = 200
MOST_BITS = 256
"""Limit for a numerator, and for a denominator."""

_BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class _Rejected(Exception):
    """The expression cannot be evaluated; the message is for the model."""


def calculate(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers, parentheses and the operators + - * / // % **, such as (7 + 8) * 2.

    Returns:
        The value, or "error: " and the reason.
    """
    try:
        if not isinstance(expression, str):  # the model's JSON may hold anything
            raise _Rejected("not arithmetic")
        if len(expression) > MOST_CHARACTERS:
            raise _Rejected(f"longer than {MOST_CHARACTERS} characters")
        return _written(_value(ast.parse(expression.strip(), mode="eval").body))
    except _Rejected as reason:
        return f"error: {reason}"
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # ast.parse raises all of them
        return "error: not arithmetic"


def _value(node: ast.expr) -> Fraction:
    """Return the exact value of a node."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):  # True is an int too
        # Through repr, which is short for a float: the literal 1e999999999 itself would have a billion digits.
        return _bounded(Fraction(repr(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return value if isinstance(node.op, ast.UAdd) else -value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _bounded(Fraction(_BINARY[type(node.op)](left, right)))
    raise _Rejected("not arithmetic")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Return a power with a whole exponent; a result that would be too large is rejected before it is computed."""
    if exponent.denominator != 1:
        raise _Rejected("the exponent is not a whole number")
    if (_bits(base) - 1) * abs(exponent.numerator) > MOST_BITS:  # the fewest bits that the power can have
        raise _Rejected("too large")
    return _bounded(Fraction(base**exponent.numerator))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MOST_BITS:
        raise _Rejected("too large")
    return value


def _written(value: Fraction) -> str:
    """Format a whole number with all its digits, any other with 12 significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"
