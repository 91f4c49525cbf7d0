"""Decide whether an answer equals the truth: take its notation apart, and compare values as numbers or by algebra."""

from itertools import pairwise

from post_training.rewards.answers import LONGEST_ANSWER, compare_plainly, is_answer
from post_training.rewards.calculator import as_latex
from post_training.rewards.conditions import equal_assignments
from post_training.rewards.congruences import equal_congruences
from post_training.rewards.notation import (
    choice,
    has_numbers_apart,
    is_number,
    is_set_beside_tuple,
    letters,
    listed,
    sides,
    uniform,
    words,
)
from post_training.rewards.units import DEGREE, Quantity, quantity, scaled
from post_training.rewards.verifier import Verifier


def equal_answers(truth: str, answer: str, verifier: Verifier) -> bool:
    """Compare two answers without their boxes, as ``answers.plain`` returns them.

    In this order: equal text (above ``LONGEST_ANSWER`` characters only that); letters of a multiple choice; words;
    units; equations, whose sides must agree; exact numbers; and math-verify for the rest.
    """
    if not is_answer(truth) or not is_answer(answer):
        return False
    if truth == answer:
        return True
    if max(len(truth), len(answer)) > LONGEST_ANSWER:
        return False
    if (ours := letters(truth)) is not None and (theirs := letters(answer)) is not None:
        return ours == theirs
    return _equal_choices(uniform(truth), uniform(answer), verifier)


def _equal_choices(truth: str, answer: str, verifier: Verifier) -> bool:
    ours, theirs = choice(truth), choice(answer)
    marked = [side for side in (ours, theirs) if side.letter and side.letter != side.value]
    if not marked:
        return _equal_words(truth, answer, verifier)
    if ours.letter and theirs.letter:
        values = [side.value for side in marked if side.value]
        return ours.letter == theirs.letter and (len(values) < 2 or _equal_words(values[0], values[1], verifier))
    return _equal_words(ours.value or ours.letter or "", theirs.value or theirs.letter or "", verifier)


def _equal_words(truth: str, answer: str, verifier: Verifier) -> bool:
    expected, found = words(truth), words(answer)
    if expected is not None or found is not None:
        return expected == found
    congruent = equal_congruences(
        truth, answer, lambda one, other: _equal_quantities(quantity(one), quantity(other), verifier)
    )
    if congruent is not None:
        return congruent
    return _equal_quantities(quantity(truth), quantity(answer), verifier)


def _equal_quantities(truth: Quantity, answer: Quantity, verifier: Verifier) -> bool:
    if not (truth.readable and answer.readable):
        return False
    if truth.unit and answer.unit:
        if truth.unit.dimension != answer.unit.dimension:
            return False
        return _equal_values(scaled(truth.value, truth.unit.factor / answer.unit.factor), answer.value, verifier)
    for one, other in ((truth, answer), (answer, truth)):
        if one.unit is None:
            continue
        if other.value.endswith("%"):
            return False
        if one.unit == DEGREE and r"\pi" in other.value:
            return verifier.equal(rf"({one.value})\cdot\frac{{\pi}}{{180}}", other.value)
    return _equal_values(truth.value, answer.value, verifier)


def _equal_values(truth: str, answer: str, verifier: Verifier) -> bool:
    truth, answer = as_latex(truth), as_latex(answer)
    assigned = equal_assignments(truth, answer, lambda one, other: _equal_sides(one, other, verifier))
    return _equal_sides(truth, answer, verifier) if assigned is None else assigned


def _equal_sides(truth: str, answer: str, verifier: Verifier) -> bool:
    expected, found = _last_side(listed(truth), verifier), _last_side(listed(answer), verifier)
    if expected is None or found is None or is_set_beside_tuple(expected, found):
        return False
    return _equal_expressions(expected, found, verifier)


def _last_side(answer: str, verifier: Verifier) -> str | None:
    """Return ``5`` for ``2+3 = 5`` and ``x = 5`` for ``x = 2+3 = 5``; None for unequal numbers, as in ``8 = 7``."""
    parts = sides(answer)
    numbers = [part for part in parts if is_number(part)]
    if len(parts) == 1 or not numbers:
        return answer
    if not all(_equal_expressions(one, other, verifier) for one, other in pairwise(numbers)):
        return None
    names = [part for part in parts if part not in numbers]
    return f"{names[0]}={numbers[-1]}" if names else numbers[-1]


def _equal_expressions(truth: str, answer: str, verifier: Verifier) -> bool:
    decided = compare_plainly(truth, answer)
    if decided is None and (has_numbers_apart(truth) or has_numbers_apart(answer)):
        return False
    return verifier.equal(truth, answer) if decided is None else decided
