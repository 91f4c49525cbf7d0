"""How a value is written in a message."""

import pytest

from verl_patches.trainer.configuration_checks.values import shown

CIRCLE: list = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("bfloat16", "bfloat16"), ("", '""'), ("two\nlines", '"two\\nlines"'), (None, "null"), (True, "true"),
        ({"a": [1]}, '{"a": [1]}'), ("数", "数"), (["数"], '["\\u6570"]'), ({1}, "{1}"), (CIRCLE, "[[...]]"),
        ("x" * 80, "x" * 80), ("x" * 81, "x" * 80 + "..."),
    ],
)  # fmt: skip
def test_a_value_is_shown_on_one_line_as_a_user_would_write_it(value, text):
    assert shown(value) == text
