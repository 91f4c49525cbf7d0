"""Finding the answer in a response, and comparing the answers that need no algebra."""

import re
from decimal import Decimal, InvalidOperation

_BOX = r"\boxed{"
_BRACES = re.compile(r"\\boxed\{|\\[{}]|[{}]")
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?")


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last complete ``\boxed{...}`` of ``text``, or None where there is none.

    Braces inside the box are balanced, and ``\{`` is no brace; a box that the end of the response cuts off does not
    count. The time is linear in the length of ``text``, whatever a model writes.
    """
    last: tuple[int, int] | None = None
    open_braces: list[int | None] = []  # where the content of a box begins, and None for any other brace
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            begin = open_braces.pop() if open_braces else None
            if begin is not None and (last is None or begin > last[0]):
                last = (begin, match.start())
        elif not token.endswith(("\\{", "\\}")):
            open_braces.append(match.end() if token == _BOX else None)
    return None if last is None else text[slice(*last)].strip()


def unboxed(answer: str) -> str:
    r"""Returns ``answer`` without a ``\boxed{...}`` around it, which some data sets keep in the answer column."""
    inner = last_boxed(answer)
    return answer.strip() if inner is None else inner


def plain_number(answer: str) -> Decimal | None:
    """Returns the value of a decimal number such as ``42``, ``-3.50`` or ``1,234``; None for anything else."""
    stripped = answer.strip().replace("\u2212", "-")
    if not any(character.isdigit() for character in stripped) or not _NUMBER.fullmatch(stripped):
        return None
    try:
        return Decimal(stripped.replace(",", ""))
    except InvalidOperation:
        return None


def compare_plainly(truth: str, answer: str) -> bool | None:
    """Compares two answers as text and as decimal numbers.

    Returns True or False where that decides the matter, and None where only algebra can: equal text is equal, two
    plain numbers are equal exactly when their values are, and everything else is undecided.
    """
    if truth.strip() == answer.strip():
        return True
    if not answer.strip():
        return False
    truth_number, answer_number = plain_number(truth), plain_number(answer)
    if truth_number is not None and answer_number is not None:
        return truth_number == answer_number
    return None
