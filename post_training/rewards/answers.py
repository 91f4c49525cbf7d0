"""Finding the answer in a response, and comparing the answers that need no algebra."""

import re
from fractions import Fraction

# \boxed{7}, \boxed {7}, \boxed on a line before {7}; and, of a number or a single letter, \boxed 7.
_BRACES = re.compile(r"\\boxed\s*\{|\\boxed\s+(?P<bare>[+-]?[0-9][^\s{}\\$]*|[A-Za-z](?![A-Za-z]))|\\[{}]|[{}]")
_TRAILING_MARKS = ".,;:!?"
_DIGITS = frozenset("0123456789")
_NUMBER = re.compile(r"[+-]?([0-9]{1,3}(,[0-9]{3})+|[0-9]+)?(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?")
_REPEATING = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*)\.(?P<fixed>[0-9]*)\\(?:overline|bar)\s*\{?(?P<repeated>[0-9]+)\}?"
)
_MIXED = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]+)(?:(?:\s|\\ )+(?P<top0>[0-9]+)\s*/\s*(?P<bottom0>[0-9]+)"
    r"|\s*\\[dt]?frac\s*\{(?P<top1>[0-9]+)\}\s*\{(?P<bottom1>[0-9]+)\})"
)
_BASED = re.compile(r"(?P<digits>[0-9A-Z]+)_\{?(?P<base>[0-9]{1,2})\}?")
_FRACTION = re.compile(
    r"(?P<sign>[+-]?)\s*(?:"
    r"(?P<top0>[0-9]+)\s*/\s*(?P<bottom0>[0-9]+)"
    r"|\\[dt]?frac\s*\{\s*(?P<top1>-?[0-9]+)\s*\}\s*\{\s*(?P<bottom1>[0-9]+)\s*\}"
    r"|\\[dt]?frac\s*(?P<top2>[0-9])\s*(?P<bottom2>[0-9])"
    r")"
)
_DIGIT_GROUPS = re.compile(r"(?<=[0-9])(?:\\[,!;: ]|~|\{,\}| )(?=[0-9]{3}(?![0-9/]))")
_NOT_A_NUMBER = re.compile(r"(?:\\(?:text|mathrm)\s*\{\s*)?(?:nan|NaN|NAN)(?:\s*\})?")
_PERCENT = re.compile(r"\s*\\?%\s*$")
# Python converts no longer strings of digits into numbers.
_LONGEST_NUMBER = 4000


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last complete ``\boxed{...}`` of ``text``, or None where there is none.

    ``\boxed 7`` is such a box too; marks of punctuation that follow the content do not belong to it.

    Braces inside the box are balanced, and ``\{`` is no brace; a box that the end of the response cuts off does not
    count. The time is linear in the length of ``text``, whatever a model writes.
    """
    last: tuple[int, int] | None = None
    open_braces: list[int | None] = []  # where the content of a box begins, and None for any other brace
    for match in _BRACES.finditer(text):
        token = match.group()
        if match["bare"] is not None:
            content = match["bare"].rstrip(_TRAILING_MARKS)
            if content and (last is None or match.start("bare") > last[0]):
                last = (match.start("bare"), match.start("bare") + len(content))
        elif token == "}":
            begin = open_braces.pop() if open_braces else None
            if begin is not None and (last is None or begin > last[0]):
                last = (begin, match.start())
        elif not token.endswith(("\\{", "\\}")):
            open_braces.append(match.end() if token.startswith("\\boxed") else None)
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


def is_answer(text: str) -> bool:
    """Whether there is something to compare: neither nothing nor NaN, which a missing value becomes on its way."""
    content = plain(text)
    return bool(content) and _NOT_A_NUMBER.fullmatch(content) is None


def rational(answer: str) -> Fraction | None:
    r"""Returns the exact value of a decimal number or a simple fraction; None for anything else.

    Decimal numbers are such as ``42``, ``-3.50``, ``1,234``, ``1.5e3`` and ``0.1\overline{6}``, fractions such as
    ``1/2``, ``\frac{1}{2}``, ``-\dfrac12`` and ``2 1/3``, and ``101_2`` is a number of another base.
    """
    text = answer.strip().replace("\u2212", "-")
    if len(text) > _LONGEST_NUMBER:
        return None
    if _is_decimal(text):
        return Fraction(text.replace(",", ""))
    match = _FRACTION.fullmatch(text)
    if match is None:
        return _rarely_written(text)
    sign, (numerator, denominator) = match["sign"], _pair(match)
    if int(denominator) == 0:
        return None
    return Fraction(int(numerator), int(denominator)) * (-1 if sign == "-" else 1)


def _rarely_written(text: str) -> Fraction | None:
    """Repeating decimals, mixed numbers, and numbers of another base."""
    if match := _REPEATING.fullmatch(text):
        fixed, repeated = match["fixed"], match["repeated"]
        scale = 10 ** len(fixed)
        value = Fraction(int((match["whole"] + fixed) or 0), scale)
        value += Fraction(int(repeated), scale * (10 ** len(repeated) - 1))
    elif match := _MIXED.fullmatch(text):
        top, bottom = int(match["top0"] or match["top1"]), int(match["bottom0"] or match["bottom1"])
        if bottom == 0:
            return None
        value = int(match["whole"]) + Fraction(top, bottom)
    elif match := _BASED.fullmatch(text):
        return _of_base(match["digits"], int(match["base"]))
    else:
        return None
    return -value if match["sign"] == "-" else value


def _of_base(digits: str, base: int) -> Fraction | None:
    try:
        return Fraction(int(digits, base)) if base > 1 else None
    except ValueError:
        return None


def _pair(match: re.Match[str]) -> tuple[str, str]:
    """Numerator and denominator, of the form that matched."""
    return next((match[f"top{form}"], match[f"bottom{form}"]) for form in range(3) if match[f"top{form}"] is not None)


def _is_decimal(text: str) -> bool:
    return any(character in _DIGITS for character in text) and _NUMBER.fullmatch(text) is not None


def compare_plainly(truth: str, answer: str) -> bool | None:
    """Compares two answers as text and as exact numbers.

    Returns True or False where that decides the matter, and None where only algebra can. Equal text and equal values
    are equal; two decimal numbers of different value, or two numbers that name their base, are not; everything else is
    undecided. A percent sign may be read as a unit, which truth or answer leave out, and as a hundredth: 25 % equals 25
    and 1/4.
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
    alike = (_is_decimal(truth_text) and _is_decimal(answer_text)) or ("_" in truth_text and "_" in answer_text)
    return False if alike else None


def _without_percent(answer: str) -> tuple[str, bool]:
    text = _PERCENT.sub("", answer)
    return text.strip(), text != answer
