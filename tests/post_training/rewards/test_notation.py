"""Non-mathematical notation of answers, rule by rule; test_rules.py scores whole answers."""

import pytest

from post_training.rewards.notation import (
    Choice,
    choice,
    has_numbers_apart,
    is_number,
    is_product,
    is_set_beside_tuple,
    sides,
    uniform,
    words,
)


@pytest.mark.parametrize(
    ("answer", "one"),
    [
        (r"\varnothing", r"\emptyset"), ("no real solutions", r"\emptyset"), ("The empty set.", r"\emptyset"),
        ("no solution for x", "no solution for x"), ("10th", "10"), (r"10^{\text{th}}", "10"), ("3rd", "3"),
        (r"\left(1,2\right]", "(1,2]"), (r"\bigl(1,2\bigr)", "(1,2)"), (r"\leftarrow", r"\leftarrow"),
        ("]1,2[", "(1,2)"), ("]1,2]", "(1,2]"), ("[1,2[", "[1,2)"), ("[1,2]", "[1,2]"), ("(1,2)", "(1,2)"),
        (r"]1,2[ \cup [3,4[", r"(1,2)\cup[3,4)"), ("50 percent", r"50\%"), (r"50~\text{ percent }", r"50\%"),
        (r"\text{5 cm}", "5 cm"), (r"\text{cm}", r"\text{cm}"), ("\u22125\u00b0", r"-5^\circ"),
        ("2\u00d73", r"2\times 3"), ("3 \u00d7 10^8", r"3 \times 10^8"), ("3 \u00b7 10^8", r"3 \cdot 10^8"),
        ("x \u2264 2", r"x \le 2"), ("x \u2265 2", r"x \ge 2"), ("2 \u03c0 r", r"2 \pi r"),
        ("\u20135", "-5"), ("x \u2013 5", "x - 5"), ("\u2013.5", "-.5"), ("\u2013\\frac{1}{2}", r"-\frac{1}{2}"),
        ("Monday\u2013Friday", "Monday\u2013Friday"),
    ],
)  # fmt: skip
def test_what_is_written_in_several_ways_has_one_notation(answer, one):
    assert uniform(answer) == one


@pytest.mark.parametrize(
    ("answer", "letter", "value"),
    [
        (r"\textbf{(C)}\ 5", "C", "5"), (r"\text{C}", "C", None), (r"\text{C} 5", None, r"\text{C} 5"),
        (r"\text{C)} 5", "C", "5"), ("(C) 5", "C", "5"), ("(C)", "C", None), ("C) 5", "C", "5"), ("C. 5", "C", "5"),
        ("C.5", None, "C.5"), ("C", "C", "C"), ("J", "J", "J"), ("K", None, "K"), ("5", None, "5"),
        ("(K) 5", None, "(K) 5"),
    ],
)  # fmt: skip
def test_a_choice_has_a_letter_a_value_or_both(answer, letter, value):
    assert choice(answer) == Choice(letter, value)


@pytest.mark.parametrize("run", ["x", "xy", "mn", "AB", "ABC", "abc", "pqr", "Z"])
def test_letters_of_products(run):
    assert is_product(run)


@pytest.mark.parametrize("run", ["no", "cat", "ABCD", "xx", "mx", "Ab", "pp"])
def test_letters_of_words(run):
    assert not is_product(run)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("Tuesday.", "tuesday"), (r"\text{Blue  car!}", "blue car"), ("the sine", "the sine"), ("sin x", None),
        ("xy", None), (r"\text{sin wave}", "sin wave"), ("this or that", "this or that"), ("cat 5", None),
        (r"\frac{cat}{dog}", None), ("cat = dog", None), ("Bob's", "bobs"), (r"red~car", "red car"),
        (r"\text{x}", None), ("this sin", None), (r"\text{no}", "no"),
    ],
)  # fmt: skip
def test_words_are_what_is_no_mathematics(answer, said):
    assert words(answer) == said


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        ("x = 2+3 = 5", ["x", "2+3", "5"]), ("5", ["5"]), ("x=5, y=3", ["x=5, y=3"]), ("x \\le 5=5", ["x \\le 5=5"]),
        ("x \\leftarrow=5", ["x \\leftarrow", "5"]), ("x := 5", ["x := 5"]), ("= 5", ["= 5"]),
        ("x != 5", ["x != 5"]), ("=".join("12345678"), list("12345678")),
        ("=".join("123456789"), ["=".join("123456789")]),
        (r"x \equiv 2 = 2", [r"x \equiv 2 = 2"]),
    ],
)  # fmt: skip
def test_an_equation_has_sides(answer, parts):
    assert sides(answer) == parts


@pytest.mark.parametrize(
    ("expression", "apart"),
    [
        ("12 34", True), ("x=1 2", True), ("(1, 1 1)", True), ("1 2.5", True), ("2 1/3", False), ("(1, 2 1/2)", False),
        (r"\frac 1 2", False), (r"\binom 5 2", False), ("1, 2", False), ("x 2", False), ("12", False),
        (r"2 \frac{1}{2}", False), ("1 + 2", False), ("2 13/3", False), (r"\log_2 8", False), ("x^2 3", False),
    ],
)  # fmt: skip
def test_numbers_apart_are_no_sum(expression, apart):
    assert has_numbers_apart(expression) is apart


@pytest.mark.parametrize(
    ("answer", "number"),
    [("8", True), ("2+3", True), (r"\sqrt{49}", True), ("x", False), ("8x", False), (r"\pi", False), ("-", False)],
)
def test_a_number_has_digits_and_no_variable(answer, number):
    assert is_number(answer) is number


@pytest.mark.parametrize(
    ("truth", "answer", "beside"),
    [
        (r"\{1,2\}", "(1,2)", True), ("[1,2]", r"\{1,2\}", True),
        (r"\{1,2\}", r"\{2,1\}", False), ("(1,2)", "(1,2)", False),
        (r"\{1\}", "1", False), ("(1,2)", "3", False), ("3", "3", False), (r"\{1,2\}", "((1,2),3)", False),
        (r"\{1,2\}", "(12)", False), (r"\{1,2\}", "1,2", False), (r"\{1,2", "(1,2)", False),
    ],
)  # fmt: skip
def test_a_set_is_no_tuple(truth, answer, beside):
    assert is_set_beside_tuple(truth, answer) is is_set_beside_tuple(answer, truth) is beside
