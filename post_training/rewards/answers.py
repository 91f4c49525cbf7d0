"""Finding the answer in a response, and comparing the answers that need no algebra."""

import re
from fractions import Fraction

from post_training.rewards.surface import bare, level

# Longer than any answer, and short enough for a request to fit into a pipe at once.
LONGEST_ANSWER = 4096
# \boxed{7}, \boxed {7}, \boxed on a line before {7}; and, of a number or a single letter, \boxed 7.
_BRACES = re.compile(
    r"\\(?:boxed|fbox|framebox)\s*\{|\\boxed\s+(?P<bare>[+-]?[0-9][^\s{}\\$]*|[A-Za-z](?![A-Za-z]))|\\[{}]|[{}]"
)
_TRAILING_MARKS = ".,;:!?"
_DIGITS = frozenset("0123456789")
_NUMBER = re.compile(r"[+-]?(?=\.?[0-9])([0-9]{1,3}(,[0-9]{3})+|[0-9]+)?(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?")
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
_COMMA_SPACES = re.compile(r"(?<=[0-9]),\\[!,](?=[0-9]{3})")
_DIGIT_GROUPS = re.compile(r"(?<=[0-9])(?:\\[,!;: ]|~|\{,\}| )(?=[0-9]{3}(?![0-9/]))")
_NOT_A_NUMBER = re.compile(r"(?:\\(?:text|mathrm)\s*\{\s*)?(?:nan|NaN|NAN)(?:\s*\})?")
_SCIENTIFIC = re.compile(
    r"(?:(?P<factor>[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?) ?"
    r"(?:\\(?:times|cdot)(?![a-zA-Z])|[*x\u00d7]) ?|(?P<sign>[+-]?))10 ?(?:\^|\*\*) ?"
    r"(?:\{ ?(?P<exponent0>[+-]?[0-9]{1,3}) ?\}|\((?P<exponent1>[+-]?[0-9]{1,3})\)|(?P<exponent2>[+-]?[0-9]{1,3}))"
)
_PERCENT = re.compile(r" ?\\?% ?$")
# A decimal number with at least so many digits that count may be a rounded one.
_ROUNDED_DIGITS = 6
# Python converts no longer strings of digits into numbers.
_LONGEST_NUMBER = 4000


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last complete ``\boxed{...}`` of ``text``, or None where there is none.

    ``\boxed 7`` and ``\fbox{7}`` are such boxes too; marks of punctuation that follow the content do not belong to it.
    An empty box counts only where all are empty.

    Braces inside the box are balanced, and ``\{`` is no brace; a box that the end of the response cuts off does not
    count. The time is linear in the length of ``text``, whatever a model writes.
    """
    last: tuple[int, int] | None = None
    empty = False
    open_braces: list[int | None] = []  # where the content of a box begins, and None for any other brace
    for match in _BRACES.finditer(text):
        token = match.group()
        begin, end = None, match.start()
        if match["bare"] is not None:
            begin, end = match.start("bare"), match.start("bare") + len(match["bare"].rstrip(_TRAILING_MARKS))
        elif token == "}":
            begin = open_braces.pop() if open_braces else None
        elif not token.endswith(("\\{", "\\}")):
            open_braces.append(match.end() if token.startswith("\\") else None)
        if begin is None or (last is not None and begin <= last[0]):
            continue
        # A box of a megabyte holds something; a short one may hold spaces alone.
        if end - begin > LONGEST_ANSWER or level(text[begin:end]):
            last = (begin, end)
        else:
            empty = True
    if last is None:
        return "" if empty else None
    return _stripped(text[slice(*last)])


def _stripped(content: str) -> str:
    """Without white space around it, but for the blank of a control space."""
    stripped = content.strip()
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    return stripped[:-1].rstrip() if backslashes % 2 else stripped


def plain(answer: str) -> str:
    r"""Returns ``answer`` without what surrounds a value and does not change it; see `surface`.

    That is a ``\boxed{...}``, which some data sets keep in the answer column, dollar signs of mathematics, a full stop,
    spaces of all kinds, markup around all of it, and thin spaces between groups of digits. A text longer than any
    answer keeps them.
    """
    inner = last_boxed(answer)
    text = (answer if inner is None else inner).strip()
    if len(text) > LONGEST_ANSWER:
        return text
    text = _COMMA_SPACES.sub(",", _DIGIT_GROUPS.sub("", text))
    return _DIGIT_GROUPS.sub("", bare(level(text)))


def is_answer(text: str) -> bool:
    """Whether there is something to compare: neither nothing nor NaN, which a missing value becomes on its way."""
    content = plain(text)
    return bool(content.strip("$ ")) and _NOT_A_NUMBER.fullmatch(content) is None


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
    if (scientific := _SCIENTIFIC.fullmatch(text)) is not None:
        return _of_powers_of_ten(scientific)
    match = _FRACTION.fullmatch(text)
    if match is None:
        return _rarely_written(text)
    sign, (numerator, denominator) = match["sign"], _pair(match)
    if int(denominator) == 0:
        return None
    return Fraction(int(numerator), int(denominator)) * (-1 if sign == "-" else 1)


def _of_powers_of_ten(match: re.Match[str]) -> Fraction | None:
    r"""The value of ``1.5\times 10^{3}`` or ``-10^3``."""
    factor = f"{match['sign']}1" if match["factor"] is None else match["factor"].replace(",", "")
    exponent = int(next(found for found in match.group("exponent0", "exponent1", "exponent2") if found is not None))
    return Fraction(factor) * Fraction(10) ** exponent if _is_decimal(factor) else None


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
    are equal, two different values are not, and everything else is undecided. A percent sign may be read as a unit,
    which truth or answer leave out, and as a hundredth: 25 % equals 25 and 1/4. A fraction also equals a decimal number
    to which it is rounded, if six of its digits or more count: 0.333333 is 1/3, and 0.33 is not.
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
    return is_rounded(truth_text, answer_value) or is_rounded(answer_text, truth_value)


def is_rounded(decimal: str, value: Fraction) -> bool:
    """Whether `value`, which is no decimal number of that length itself, is rounded to a decimal number."""
    match = re.fullmatch(r"[+-]?([0-9]*)\.([0-9]+)", decimal)
    if match is None or len((match[1] + match[2]).lstrip("0")) < _ROUNDED_DIGITS:
        return False
    if pow(10, value.denominator.bit_length(), value.denominator) == 0:
        return False  # 1/8 has a last digit, and is written in full
    return abs(value - Fraction(decimal)) <= Fraction(1, 2 * 10 ** len(match[2]))


def _without_percent(answer: str) -> tuple[str, bool]:
    text = _PERCENT.sub("", answer)
    return text.strip(), text != answer
