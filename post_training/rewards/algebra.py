r"""math-verify with exact comparisons of numbers; imported only by the worker, since it loads the algebra system.

math-verify decides which expressions, sets, intervals, matrices and relations are equal. It compares numbers by
rounding to six decimals or by their difference at 15 digits, so that any two values near zero are equal, and it treats
two equations without a solution as equal. Both are replaced here:

- Numbers without a variable: exactly if they are rational, otherwise to 45 of 60 digits, relative to their size.
- Expressions with variables: at several points, of both signs. If both sides have roots or logarithms, at positive
  points, so that ``\sqrt{ab}`` is ``\sqrt{a}\sqrt{b}``; ``\sqrt{x^2}`` and ``x`` still differ.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, grader, parse, verify
from sympy import Abs, Basic, Float, MatrixBase, Pow, Rational, UnevaluatedExpr, log

_DIGITS = 60
_TOLERANCE = Rational(1, 10**45)
_POINTS = 8
_MOST_TRIALS = 32
_MOST_VARIABLES = 8
_ROUNDED_DIGITS = 6
_PERCENT = UnevaluatedExpr(Rational(1, 100))


def load_comparison() -> Callable[[str, str], bool]:
    """Return math-verify as `equal(truth, answer)`, without its own time limits: the evaluator is killed instead."""
    grader.sympy_numeric_eq = _equal_numbers
    grader.solve = _solved
    # Its list of units has single letters, which are removed: 16t becomes 16. Units are left to units.py. The second
    # extraction, of the first number in a text, is off: an answer that it cannot read must not become a part of itself.
    latex = LatexExtractionConfig()
    configuration = (replace(latex, normalization_config=replace(latex.normalization_config, units=False)),)

    def equal(truth: str, answer: str) -> bool:
        parsed = [parse(f"\\boxed{{{side}}}", configuration, parsing_timeout=None) for side in (truth, answer)]
        return bool(verify(*parsed, timeout_seconds=None, allow_set_relation_comp=True))

    # The parser builds its tables at first use, so use it once here.
    equal(r"\frac{1}{2}", r"\{0.5\}")
    return equal


def _solved(*arguments: Any, **options: Any) -> Any:
    """Call sympy's `solve` and raise if it finds nothing: two equations without a solution are not thereby equal."""
    found = sympy.solve(*arguments, **options)
    if not found:
        raise ValueError("no solution")
    return found


def _equal_numbers(truth: Any, answer: Any, float_rounding: int, numeric_precision: int) -> bool:
    """Replace math-verify's function with these arguments."""
    if isinstance(truth, MatrixBase) and isinstance(answer, MatrixBase):
        return truth.shape == answer.shape and all(
            _equal_numbers(*pair, float_rounding, numeric_precision)
            for pair in zip(truth.flat(), answer.flat(), strict=True)
        )
    if not isinstance(truth, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return False
    bare = _without_percent(truth), _without_percent(answer)
    if bare != (truth, answer) and _equal_numbers(*bare, float_rounding, numeric_precision):
        return True
    variables = sorted(truth.free_symbols | answer.free_symbols, key=str)
    if variables:
        # Before anything is evaluated: \sqrt{a^2b} becomes |a|\sqrt{b}.
        positive = _has_root(truth) and _has_root(answer) and not (truth.has(Abs) or answer.has(Abs))
        return truth.free_symbols == answer.free_symbols and _equal_at_points(
            _exact(truth), _exact(answer), variables, positive
        )
    return _equal_values(_exact(truth), _exact(answer)) or _is_rounded(truth, answer) or _is_rounded(answer, truth)


def _without_percent(expression: sympy.Expr) -> sympy.Expr:
    if isinstance(expression, sympy.Mul) and len(expression.args) == 2 and expression.args[1] == _PERCENT:
        return expression.args[0]
    return expression


def _exact(expression: sympy.Expr) -> sympy.Expr:
    """Turn decimal numbers into fractions, and evaluate everything that can be evaluated."""
    written = {number: Rational(_digits(number)) for number in expression.atoms(Float)}
    return expression.xreplace(written).doit()


def _digits(number: Float) -> str:
    return sympy.sstr(number, full_prec=False)


def _equal_values(truth: sympy.Expr, answer: sympy.Expr) -> bool:
    if truth.is_Rational and answer.is_Rational:
        return bool(truth == answer)
    if not truth.is_finite or not answer.is_finite:
        return bool(truth == answer)
    ours, theirs = (side.evalf(_DIGITS) for side in (truth, answer))
    if not all(side.is_number and side.is_finite for side in (ours, theirs)):
        return False
    size = max(abs(ours), abs(theirs))
    return bool(abs(ours - theirs) <= _TOLERANCE * size)


def _is_rounded(decimal: sympy.Expr, value: sympy.Expr) -> bool:
    """Return whether `decimal`, with six digits or more, is the irrational `value` rounded."""
    if not isinstance(decimal, Float) or isinstance(value, Float):
        return False
    whole, _, behind = _digits(decimal).lstrip("-").partition(".")
    exact = _exact(value)
    if (
        exact.is_Rational
        or not exact.is_real
        or len((whole + behind).lstrip("0")) < _ROUNDED_DIGITS
        or not behind.isdigit()
    ):
        return False
    return bool(abs(exact.evalf(_DIGITS) - Rational(_digits(decimal))) <= Rational(1, 2 * 10 ** len(behind)))


def _equal_at_points(truth: sympy.Expr, answer: sympy.Expr, variables: list[Basic], positive: bool) -> bool:
    if len(variables) > _MOST_VARIABLES:
        return False
    compared = 0
    for point in _points(variables, positive):
        ours, theirs = (side.subs(point).doit() for side in (truth, answer))
        values = [side.evalf(_DIGITS) for side in (ours, theirs)]
        # Outside its domain an expression has another value or none.
        if not all(value.is_real and value.is_finite for value in values):
            continue
        if not _equal_values(ours, theirs):
            return False
        compared += 1
        if compared == _POINTS:
            return True
    return False


def _has_root(expression: sympy.Expr) -> bool:
    return expression.has(log) or any(
        not power.exp.is_integer and not power.base.is_number for power in expression.atoms(Pow)
    )


def _points(variables: list[Basic], positive: bool) -> Iterator[dict[Basic, Rational]]:
    r"""Yield points at which expressions are unlikely to be equal by accident; the same ones for every pair.

    The first eight have all signs of up to three variables, within and beyond 1: \sqrt{(x+1)^2} is x+1 only above -1.
    """
    generator = random.Random(len(variables))
    for trial in range(_MOST_TRIALS):
        yield {
            name: Rational(generator.randint(1, 96), 97 if (trial >> (number + 1)) % 2 else generator.choice((3, 7)))
            * (-1 if not positive and (trial >> number) % 2 else 1)
            for number, name in enumerate(variables)
        }
