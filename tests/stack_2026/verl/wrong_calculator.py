"""A calculator tool for verl's agent loops whose results are one too large."""

from verl.tools.function_tool import function_tool

from post_training import calculator


@function_tool
def calculate(expression: str) -> str:
    """Calculate the value of an arithmetic expression, and add one.

    Args:
        expression: Numbers and operators.
    """
    value = calculator.calculate(expression)
    return value if value.startswith("error") else str(int(value) + 1)
