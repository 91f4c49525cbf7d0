"""Finding the answer in a response, and comparing the answers that need no algebra."""

import re
from fractions import Fraction

_BOX = r"\boxed{"
_BRACES = re.compile(r"\\boxed\{|\\[{}]|[{}]")
_DIGITS = frozenset("0123456789")
_NUMBER = re.compile(r"[+-]?([0-9]{1,3}(,[0-9]{3})+|[0-9]+)?(\.[0-9]+)?")
_FRACTION = re.compile(
    r"(?P<sign>[+-]?)\s*(?:"
    r"(?P<top0>[0-9]+)\s*/\s*(?P<bottom0>[0-9]+)"
    r"|\\[dt]?frac\s*\{\s*(?P<top1>-?[0-9]+)\s*\}\s*\{\s*(?P<bottom1>[0-9]+)\s*\}"
    r"|\\[dt]?frac\s*(?P<top2>[0-9])\s*(?P<bottom2>[0-9])"
    r")"
)
_DIGIT_GROUPS = re.compile(r"(?<=[0-9])(?:\\[,!;: ]|~|\{,\})(?=[0-9]{3}(?![0-9]))")
_PERCENT = re.compile(r"\s*\\?%\s*$")
# Python converts no longer strings of digits into numbers.
_LONGEST_NUMBER = 4000


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


def plain(answer: str) -> str:
    r"""Returns ``answer`` without what surrounds a value and does not change it.

    That is a ``\boxed{...}``, which some data sets keep in the answer column, dollar signs of mathematics, a full stop,
    and thin spaces between groups of digits.
    """
    inner = last_boxed(answer)
    text = (answer if inner is None else inner).strip()
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text.strip("$").strip()
    if text.endswith(".") and not text.endswith("\\."):
        text = text[:-1].rstrip()
    return _DIGIT_GROUPS.sub("", text)


def rational(answer: str) -> Fraction | None:
    r"""Returns the exact value of a decimal number or a simple fraction; None for anything else.

    Decimal numbers are such as ``42``, ``-3.50`` and ``1,234``, fractions such as ``1/2``, ``\frac{1}{2}`` and
    ``-\dfrac12``.
    """
    text = answer.strip().replace("\u2212", "-")
    if len(text) > _LONGEST_NUMBER:
        return None
    if _is_decimal(text):
        return Fraction(text.replace(",", ""))
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, numerator, denominator = match["sign"], *next(pair for pair in _pairs(match) if pair[0] is not None)
    if int(denominator) == 0:
        return None
    return Fraction(int(numerator), int(denominator)) * (-1 if sign == "-" else 1)


def _pairs(match: re.Match[str]) -> list[tuple[str | None, str | None]]:
    return [(match[f"top{form}"], match[f"bottom{form}"]) for form in range(3)]


def _is_decimal(text: str) -> bool:
    return any(character in _DIGITS for character in text) and _NUMBER.fullmatch(text) is not None


def compare_plainly(truth: str, answer: str) -> bool | None:
    """Compares two answers as text and as exact numbers.

    Returns True or False where that decides the matter, and None where only algebra can: equal text and equal values
    are equal, two decimal numbers of different value are not, and everything else is undecided. A percent sign may be
    read as a unit, which truth or answer leave out, and as a hundredth: 25 % equals 25 and 1/4.
    """
    if truth.strip() == answer.strip():
        return True
    if not answer.strip():
        return False
    (truth_text, truth_percent), (answer_text, answer_percent) = map(_without_percent, (truth, answer))
    truth_value, answer_value = rational(truth_text), rational(answer_text)
    if truth_value is None or answer_value is None:
        return None
    if truth_value == answer_value:
        return True
    if truth_percent != answer_percent:
        scale = 100 if truth_percent else Fraction(1, 100)
        return truth_value == answer_value * scale
    return False if _is_decimal(truth_text) and _is_decimal(answer_text) else None


def _without_percent(answer: str) -> tuple[str, bool]:
    text = _PERCENT.sub("", answer)
    return text.strip(), text != answer
