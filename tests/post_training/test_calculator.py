"""The calculator agrees with Python, and whatever a model writes is evaluated quickly and never run as Python."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from post_training.calculator import MOST_BITS, MOST_CHARACTERS, calculate

NUMBERS = st.integers(0, 99).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(lambda each: f"({''.join(each)})"),
        inner.map(lambda each: f"(-{each})"),
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(EXPRESSIONS)
def test_whole_numbers_are_pythons(expression):
    assume(len(expression) <= MOST_CHARACTERS)
    try:
        expected = str(eval(expression))
    except ZeroDivisionError:
        expected = "error: division by zero"
    assert calculate(expression) == expected


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7*8", "56"), (" 2 - 7 ", "-5"), ("2**10", "1024"), ("2**-1", "0.5"), ("-2**2", "-4"), ("0.1+0.2", "0.3"),
        ("1/3*3", "1"), ("10/4", "2.5"), ("2/3", "0.666666666667"), ("7.5 // 2", "3"), ("1e3", "1000"), ("+-+4", "-4"),
        ("(1+\n2)*3", "9"), ("2**255", str(2**255)),
    ],
)  # fmt: skip
def test_value_is_exact(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("9**9**9**9", "too large"), ("(2**200)**200", "too large"), (f"2**{MOST_BITS + 1}", "too large"),
        ("1e300*1e300", "too large"), ("9" * 190, "too large"), ("2**0.5", "the exponent is not a whole number"),
        ("1+" * 100 + "1", f"longer than {MOST_CHARACTERS} characters"), ("1//0", "division by zero"),
        ("0**-1", "division by zero"), ("1%0", "division by zero"),
        *((text, "not arithmetic") for text in (
            "", "7*", "7 8", "x", "__import__('os').system('true')", "abs(1)", "1 if 2 else 3", "[1]*9", "'a'*9",
            "True+1", "1j", "1 << 99", "2^3", "(a:=1)", "lambda: 1", "1e999", "1e999999999", "1\x002", "(" * 99, "((1)",
            "-" * 150,
        )),
    ],
)  # fmt: skip
def test_rejected_with_its_reason(expression, reason):
    assert calculate(expression) == f"error: {reason}"


@pytest.mark.parametrize("expression", [7, None, ["7*8"], {"expression": "7*8"}])
def test_argument_that_is_no_text_rejected(expression):
    assert calculate(expression) == "error: not arithmetic"


@settings(max_examples=300)
@given(st.text(alphabet="0123456789+-*/%().e jx[]'\n", max_size=60))
def test_any_text_has_an_answer(text):
    assert isinstance(calculate(text), str)
