"""Whether an answer is the truth: notation is taken apart here, and values are compared by numbers or by algebra."""

from itertools import pairwise

from post_training.rewards.answers import compare_plainly, is_answer, rational
from post_training.rewards.judge import LONGEST_ANSWER, Judge
from post_training.rewards.notation import choice, is_number, is_set_beside_tuple, sides, uniform, words
from post_training.rewards.units import DEGREE, Quantity, Unit, quantity


def equal_answers(truth: str, answer: str, judge: Judge) -> bool:
    """Compares two answers without their boxes, as ``answers.plain`` returns them.

    In this order: equal text (above ``LONGEST_ANSWER`` characters nothing else); letters of a multiple choice; words;
    units; equations, whose sides must agree; exact numbers; and, for what is left, math-verify.
    """
    if not is_answer(truth) or not is_answer(answer):
        return False
    if truth == answer:
        return True
    if max(len(truth), len(answer)) > LONGEST_ANSWER:
        return False
    return _equal_choices(uniform(truth), uniform(answer), judge)


def _equal_choices(truth: str, answer: str, judge: Judge) -> bool:
    ours, theirs = choice(truth), choice(answer)
    marked = [side for side in (ours, theirs) if side.letter and side.letter != side.value]
    if not marked:
        return _equal_words(truth, answer, judge)
    if ours.letter and theirs.letter:
        values = [side.value for side in marked if side.value]
        return ours.letter == theirs.letter and (len(values) < 2 or _equal_words(values[0], values[1], judge))
    return _equal_words(ours.value or ours.letter or "", theirs.value or theirs.letter or "", judge)


def _equal_words(truth: str, answer: str, judge: Judge) -> bool:
    expected, found = words(truth), words(answer)
    if expected is not None or found is not None:
        return expected == found
    return _equal_quantities(quantity(truth), quantity(answer), judge)


def _equal_quantities(truth: Quantity, answer: Quantity, judge: Judge) -> bool:
    if truth.unit and answer.unit:
        if truth.unit.dimension != answer.unit.dimension:
            return False
        return _equal_values(_scaled(truth, truth.unit, answer.unit), answer.value, judge)
    for one, other in ((truth, answer), (answer, truth)):
        if one.unit is None:
            continue
        if other.value.endswith("%"):
            return False
        if one.unit == DEGREE and r"\pi" in other.value:
            return judge.equal(rf"({one.value})\cdot\frac{{\pi}}{{180}}", other.value)
    return _equal_values(truth.value, answer.value, judge)


def _scaled(given: Quantity, own: Unit, unit: Unit) -> str:
    """The value of a quantity, which is in its `own` unit, in another unit of its dimension."""
    ratio = own.factor / unit.factor
    if ratio == 1:
        return given.value
    value = rational(given.value)
    if value is None:
        return rf"({given.value})\cdot\frac{{{ratio.numerator}}}{{{ratio.denominator}}}"
    value *= ratio
    return f"{value.numerator}/{value.denominator}"


def _equal_values(truth: str, answer: str, judge: Judge) -> bool:
    expected, found = _last_side(truth, judge), _last_side(answer, judge)
    if expected is None or found is None or is_set_beside_tuple(expected, found):
        return False
    return _equal_expressions(expected, found, judge)


def _last_side(answer: str, judge: Judge) -> str | None:
    """``5`` for ``2+3 = 5`` and ``x = 5`` for ``x = 2+3 = 5``; None where numbers are not equal, as in ``8 = 7``."""
    parts = sides(answer)
    numbers = [part for part in parts if is_number(part)]
    if len(parts) == 1 or not numbers:
        return answer
    if not all(_equal_expressions(one, other, judge) for one, other in pairwise(numbers)):
        return None
    names = [part for part in parts if part not in numbers]
    return f"{names[0]}={numbers[-1]}" if names else numbers[-1]


def _equal_expressions(truth: str, answer: str, judge: Judge) -> bool:
    decided = compare_plainly(truth, answer)
    return judge.equal(truth, answer) if decided is None else decided
