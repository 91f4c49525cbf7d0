"""Find the answer in a response, and compare answers that need no algebra."""

import re
from collections.abc import Iterator
from fractions import Fraction

from post_training.rewards.surface import bare, level

# Longer than any answer, and short enough for a request to fit into a pipe at once.
LONGEST_ANSWER = 4096
# \boxed{7}, \boxed {7}, \boxed on a line before {7}; \boxed without braces; and all that opens or closes a formula.
_TOKENS = re.compile(
    r"\\(?:boxed|fbox|framebox)\s*\{|(?P<bare>\\boxed(?![a-zA-Z])[ \t]*\n?[ \t]*)|\\[{}$]|\\\\(?=[()\[\]])|[{}]"
    r"|(?P<delimiter>\\[()\[\]]|\$\$?)|(?P<line_end>\n(?P<blank>[ \t\r]*\n)?)"
)
_CLOSING = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
# A number or a letter that nothing continues: \boxed 7, **\boxed 7**, but not the 2 of \boxed 2\sqrt{3} or \boxed 2, 3.
_LONE = re.compile(
    r"(?:[+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?(?:\\?%)?|[A-Za-z])"
    r"(?![\w%(\[{!'|]|[.,:][0-9]|,[ \t]*[+-]?[0-9]|\*{1,3}[^\s.,;:!?*]|[ \t]+\*(?!\*))"
    r"(?![ \t]*(?:[-+/^_=>±·×÷−√≈≠≤≥]|<(?![|/｜])|\\(?![)\]]|\\(?![a-zA-Z]))))"
)
_TRAILING_MARKS = ".,;:? \t\r"
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
# Significant digits from which on a decimal number may be a rounded one.
_ROUNDED_DIGITS = 6
# Python refuses to convert longer strings of digits into numbers.
_LONGEST_NUMBER = 4000


def last_boxed(text: str, strict: bool = False) -> str | None:
    r"""Return the content of the last complete ``\boxed{...}`` of ``text``, or None if there is none.

    ``\fbox{7}`` is a box too. An empty box counts only if all boxes are empty.

    Braces inside the box are balanced, and ``\{`` does not count as a brace; a box cut off by the end of the response
    does not count. The time is linear in the length of ``text``, whatever a model writes.

    A box without braces, ``$\boxed 2\sqrt{3}$``, ends with its formula or its line; punctuation at its end does not
    belong to it. Outside a formula it counts only as a number or a letter that nothing continues.

    Args:
        text: a response, a solution or an answer.
        strict: return None if a later ``\boxed`` has neither braces nor a content whose end is clear.
    """
    last: tuple[int, int] | None = None
    empty = unclear = False
    for begin, end in _boxes(text):
        if last is not None and begin <= last[0]:
            continue
        if end is None:
            unclear = True
        # A long box is surely not empty; a short one may hold only spaces.
        elif end - begin > LONGEST_ANSWER or level(text[begin:end]):
            last, unclear = (begin, end), False
        else:
            empty = True
    if strict and unclear:
        return None
    if last is None:
        return "" if empty else None
    return _stripped(text[slice(*last)])


def _boxes(text: str) -> Iterator[tuple[int, int | None]]:
    """Yield begin and end of the content of each box, in the order of the ends; the end is None if it is unclear."""
    open_braces: list[int | None] = []  # where the content of a box begins, and None for any other brace
    closing = ""  # the delimiter at which the current formula ends
    bare: tuple[int, int] | None = None  # begin of a box without braces, and the number of braces around it
    for match in _TOKENS.finditer(text):
        token = match.group()
        ends = token == "}" or match["line_end"] or match["bare"] or (closing and token.startswith(closing))
        if bare is not None and ends and len(open_braces) <= bare[1]:
            yield bare[0], _end_without_braces(text, bare[0], match)
            bare = None
        if match["bare"]:
            bare = (match.end(), len(open_braces)) if closing else None
            if bare is None:
                yield match.end(), _end_without_braces(text, match.end(), None)
        elif match["delimiter"]:
            closing = "" if token == closing else closing or _CLOSING.get(token, "")
        elif match["line_end"]:
            closing = "" if match["blank"] and closing == "$" else closing
        elif token == "}":
            begin = open_braces.pop() if open_braces else None
            if begin is not None:
                yield begin, match.start()
        elif token.endswith("{") and token != r"\{":
            open_braces.append(match.end() if token.startswith("\\") else None)
    if bare is not None:
        yield bare[0], _end_without_braces(text, bare[0], None)


def _end_without_braces(text: str, begin: int, after: re.Match[str] | None) -> int | None:
    """Return the end of a box without braces; `after` is the token behind it in its formula, if it is in one."""
    lone = _LONE.match(text, begin)
    # The dollar sign of a price opens no formula, so a lone number is preferred to the rest of its line.
    if after is None or after["bare"] or (after["line_end"] and lone is not None):
        return None if lone is None else lone.end()
    content = text[begin : after.start()].rstrip(_TRAILING_MARKS).removesuffix(r"\\").rstrip(_TRAILING_MARKS)
    return begin + len(content) if content else None


def _stripped(content: str) -> str:
    """Strip white space, and also the backslash of a control space whose blank was stripped."""
    stripped = content.strip()
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    return stripped[:-1].rstrip() if backslashes % 2 else stripped


def plain(answer: str) -> str:
    r"""Return ``answer`` without surroundings that do not change its value; see `surface`.

    It removes a ``\boxed{...}``, which some data sets keep in the answer column, dollar signs of math mode, a full
    stop, spaces of all kinds, markup around the whole answer, and thin spaces between groups of digits. From a text
    longer than any answer it removes only the box.
    """
    inner = last_boxed(answer)
    text = (answer if inner is None else inner).strip()
    if len(text) > LONGEST_ANSWER:
        return text
    text = _COMMA_SPACES.sub(",", _DIGIT_GROUPS.sub("", text))
    return _DIGIT_GROUPS.sub("", bare(level(text)))


def is_answer(text: str) -> bool:
    """Return whether there is something to compare: not empty, and not NaN, which missing values turn into."""
    content = plain(text)
    return bool(content.strip("$ ")) and _NOT_A_NUMBER.fullmatch(content) is None


def rational(answer: str) -> Fraction | None:
    r"""Return the exact value of a decimal number or a simple fraction; None for anything else.

    Decimal numbers are written like ``42``, ``-3.50``, ``1,234``, ``1.5e3`` and ``0.1\overline{6}``, fractions like
    ``1/2``, ``\frac{1}{2}``, ``-\dfrac12`` and ``2 1/3``; ``101_2`` is a number of another base.
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
    r"""Return the value of ``1.5\times 10^{3}`` or ``-10^3``."""
    factor = f"{match['sign']}1" if match["factor"] is None else match["factor"].replace(",", "")
    exponent = int(next(found for found in match.group("exponent0", "exponent1", "exponent2") if found is not None))
    return Fraction(factor) * Fraction(10) ** exponent if _is_decimal(factor) else None


def _rarely_written(text: str) -> Fraction | None:
    """Return the value of a repeating decimal, a mixed number, or a number of another base; None for anything else."""
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
    """Return numerator and denominator of the form that matched."""
    return next((match[f"top{form}"], match[f"bottom{form}"]) for form in range(3) if match[f"top{form}"] is not None)


def _is_decimal(text: str) -> bool:
    return any(character in _DIGITS for character in text) and _NUMBER.fullmatch(text) is not None


def compare_plainly(truth: str, answer: str) -> bool | None:
    """Compare two answers as text and as exact numbers.

    Returns True or False if that decides the result, and None if only algebra can. Equal text and equal values are
    equal, two different values are not, and everything else is undecided. A percent sign may be read as a unit that
    truth or answer leaves out, or as a hundredth: 25 % equals 25 and 1/4. A fraction also equals the decimal number to
    which it rounds, if that has six significant digits or more: 0.333333 is 1/3, and 0.33 is not.
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
    """Return whether `decimal` is `value` rounded, for a value that has no finite decimal form itself."""
    match = re.fullmatch(r"[+-]?([0-9]*)\.([0-9]+)", decimal)
    if match is None or len((match[1] + match[2]).lstrip("0")) < _ROUNDED_DIGITS:
        return False
    if pow(10, value.denominator.bit_length(), value.denominator) == 0:
        return False  # 1/8 has a last digit, and is written in full
    return abs(value - Fraction(decimal)) <= Fraction(1, 2 * 10 ** len(match[2]))


def _without_percent(answer: str) -> tuple[str, bool]:
    text = _PERCENT.sub("", answer)
    return text.strip(), text != answer
