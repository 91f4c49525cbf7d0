r"""Values with units and number words: ``12\text{ cm}``, ``5 million dollars``, ``2小时30分``, ``60^\circ``, ``\$20``.

A unit that one side leaves out is ignored; two units must be the same or convertible: 12 cm is 12 and 120 mm, but not
12 m. Number words always count: 5 million is 5000000, 3 quarters are 3/4, 20 squared is 400.
"""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from post_training.rewards.answers import rational
from post_training.rewards.notation import MATHEMATICAL, is_product
from post_training.rewards.unit_table import (
    CHANGING,
    CHINESE,
    EARLIER_POWERS,
    IGNORED,
    LATER_POWERS,
    PARTS,
    SCALES,
    UNITS,
)

_CURRENCIES = {"\\$": "dollar", "$": "dollar", "\u20ac": "euro", "\u00a3": "pound sterling", "\u00a5": "yuan"}

# Every character belongs to one token, so that the time is linear in the length of what a model writes.
_TOKENS = re.compile(
    r"\\(?:text|textrm|textbf|textit|mathrm|mbox|hbox)\s?\{(?P<marked>[^{}]*)\}"
    r"|(?P<degree>\^?\{?\\(?:circ|degree)(?![a-zA-Z])\}?)"
    r"|(?P<gap>\\[,;:! ]|~|\s|\\(?:quad|cdot)(?![a-zA-Z]))"
    r"|(?P<power>\^(?:-?[0-9]|\{-?[0-9]\}))"
    r"|(?P<chinese>[\u3400-\u9fff]+)"
    r"|(?P<word>(?<![a-zA-Z\\])[a-zA-Z]+)"
    r"|(?P<slash>/)"
    r"|(?P<other>\\[a-zA-Z]+|\\.|.)",
    re.DOTALL,
)
# 20\frac{\text{m}}{\text{s}} is 20 m/s, and 每小时60千米 is 60千米/小时.
_FRACTION_OF_UNITS = re.compile(
    r"\\[dt]?frac ?\{ ?\\(?:text|textrm|mathrm) ?\{([^{}]*)\} ?\} ?\{ ?\\(?:text|textrm|mathrm) ?\{([^{}]*)\} ?\}$"
)
_EACH_BEFORE = re.compile(r"\u6bcf([\u3400-\u9fff]{1,3}) ?(?=[0-9])")
_NUMERIC = re.compile(r"[0-9]|\\pi(?![a-zA-Z])")
_SPOKEN = re.compile(r"[\u3400-\u9fff]+|(?:(?![\u3400-\u9fff])[^\W\d_])+|/|\^\{?-?[0-9]")
_CHINESE_WORDS = re.compile("|".join(CHINESE) + "|.")
_NUMBERS = re.compile(r"([0-9]+(?:\.[0-9]+)?)")
# A unit is a few words; endless repetition by a model is not a unit.
_MOST_WORDS = 16
_HIGHEST_POWER = 9
_LARGEST_SCALE = 10**30
_MOST_AMOUNTS = 4

Dimension = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Unit:
    """A unit.

    Attributes:
        dimension: base units with their powers, sorted.
        factor: size of the unit in base units.
    """

    dimension: Dimension
    factor: Fraction


DEGREE = Unit((("degree", 1),), Fraction(1))
DOLLAR = Unit((("dollar", 1),), Fraction(1))


@dataclass(frozen=True)
class Quantity:
    """A value and its unit.

    Attributes:
        unit: None if there is none, or only a word without meaning (``units``).
        readable: False if words after the number change it in an unknown way; it then equals only the same text.
    """

    value: str
    unit: Unit | None
    readable: bool = True


class _Phrase:
    """The meaning of the words after a number: its multiplier, further forms, and its unit."""

    def __init__(self) -> None:
        self.scale = Fraction(1)
        self.forms: list[str] = []
        self.powers: Counter[str] = Counter()
        self.readable = True


def quantity(answer: str) -> Quantity:
    """Take an answer apart; all of it is the value if no unit follows (and no currency precedes) a number."""
    for sign, name in _CURRENCIES.items():
        amount = answer.removeprefix(sign)
        if amount != answer and _NUMERIC.search(amount):
            rest = _amount(amount.strip())
            return Quantity(rest.value, rest.unit or _unit(Counter({name: 1})), rest.readable)
    return _amount(answer)


def _amount(answer: str) -> Quantity:
    if (total := _sum_of_amounts(answer)) is not None:
        return total
    answer = _with_units_behind(answer)
    tokens = list(_TOKENS.finditer(answer))
    first = _first_of_unit(tokens)
    value = answer[: tokens[first].start()] if first < len(tokens) else answer
    if first == len(tokens) or not _NUMERIC.search(value):
        return Quantity(answer, None)
    phrase = _phrase(_words_of(tokens[first:]))
    if not phrase.readable:
        return Quantity(answer, None, readable=False)
    return Quantity(_formed(value.strip(), phrase), _unit(phrase.powers))


def _with_units_behind(answer: str) -> str:
    """Rewrite a rate as a number, a unit, a slash and a unit."""
    each = _EACH_BEFORE.match(answer)
    if each is not None and each[1] in UNITS:
        answer = f"{answer[each.end() :]}/{each[1]}"
    return _FRACTION_OF_UNITS.sub(r"\\text{\1}/\\text{\2}", answer)


def _first_of_unit(tokens: list[re.Match[str]]) -> int:
    """Return the index of the token at which the unit at the end begins, with gaps before it; their count if none."""
    first = len(tokens)
    for position in range(len(tokens) - 1, -1, -1):
        before = tokens[position - 1].lastgroup if position else None
        match tokens[position].lastgroup:
            case "marked" | "degree" | "chinese":
                first = position
            case "word" if _is_unit(tokens[position]["word"], before):
                first = position
            case "gap":
                first = position if first == position + 1 else first
            case "slash" if first <= position + 2:
                # 40/\text{hour} has no unit above the slash; 3/s may divide by a variable.
                if any(token.lastgroup in ("marked", "chinese") for token in tokens[position + 1 : position + 3]):
                    first = position
            case "power" if before in ("marked", "word", "chinese"):
                continue
            case _:
                break
    return first


def _is_unit(word: str, before: str | None) -> bool:
    """Return whether a word without markup is a unit: a known one (``12cm``), or any word but a product after a gap."""
    known = any(_singular(word) in names for names in (UNITS, EARLIER_POWERS, LATER_POWERS, SCALES, PARTS))
    if before in ("slash", "degree"):
        return known
    if before == "gap":
        return known or not (is_product(word) or word.lower() in MATHEMATICAL)
    return known and len(word) > 1


def _words_of(tokens: list[re.Match[str]]) -> list[str]:
    # A gap may be \cdot or \quad, which are not words.
    spoken = " ".join(
        "degree" if token["degree"] else token["marked"] or token.group() for token in tokens if not token["gap"]
    )
    words: list[str] = []
    for word in _SPOKEN.findall(spoken):
        words += _segmented(word) if ord(word[0]) > 0x2E80 else [word]
    return words


def _segmented(run: str) -> list[str]:
    """Split ``平方厘米`` into 平方 and 厘米, ``个苹果`` into 个 and 苹果: known words, longest first, and the rest."""
    words: list[str] = []
    unknown = ""
    for found in _CHINESE_WORDS.findall(run):
        if len(found) > 1 or found in CHINESE:
            words += [*([unknown] if unknown else []), found]
            unknown = ""
        else:
            unknown += found
    return [*words, unknown] if unknown else words


def _phrase(words: list[str]) -> _Phrase:
    """Read units with their powers, and number words before them: ``million square feet per second``."""
    phrase = _Phrase()
    if len(words) > _MOST_WORDS:
        phrase.readable = False
        return phrase
    if [word.lower() for word in words[-2:]] == ["below", "zero"] or words[:1] == ["\u8d1f"]:
        phrase.scale, words = Fraction(-1), words[:-2] if words[-1:] == ["zero"] else words[1:]
    sign, power, last = 1, 1, ""
    for word in words:
        name = _singular(word)
        if word in ("/", "per", "\u6bcf"):
            sign = -1
        elif name in EARLIER_POWERS:
            power = EARLIER_POWERS[name]
        elif name in LATER_POWERS or word[0] == "^":
            raised = LATER_POWERS.get(name) or int(word.lstrip("^{"))
            if last:
                phrase.powers[last] *= raised
            else:
                phrase.forms.append(f"^{{{raised}}}")
            phrase.readable &= abs(phrase.powers[last]) <= _HIGHEST_POWER and len(phrase.forms) < 2
        elif not last and _is_number_word(phrase, name):
            continue
        elif word.lower() in CHANGING or name in SCALES or name in PARTS:
            phrase.readable = False
        else:
            for each in ("degree", "C") if name == "\u6444\u6c0f\u5ea6" else (name,):
                last = each if each == "unit" or each not in IGNORED else last
                phrase.powers[each] += sign * power
            power = 1
    phrase.readable &= abs(phrase.scale) <= _LARGEST_SCALE
    return phrase


def _is_number_word(phrase: _Phrase, name: str) -> bool:
    """Apply million, quarter, factorial or pi to the phrase; return whether the name is one of them."""
    if name in SCALES:
        phrase.scale *= SCALES[name]
    elif name in PARTS:
        phrase.scale /= PARTS[name]
    elif name == "pi":
        phrase.forms.append(r"\pi")
    elif name == "factorial":
        phrase.forms.append("!")
    else:
        return False
    return True


def _formed(value: str, phrase: _Phrase) -> str:
    """Apply the words after a value to it."""
    for form in phrase.forms:
        value = rf"({value})\cdot\pi" if form == r"\pi" else f"({value}){form}"
    return scaled(value, phrase.scale)


def scaled(value: str, ratio: Fraction) -> str:
    """Multiply a value by `ratio`: a number becomes a fraction, anything else an expression."""
    if ratio == 1:
        return value
    number = rational(value)
    if number is None:
        return rf"({value})\cdot\frac{{{ratio.numerator}}}{{{ratio.denominator}}}"
    number *= ratio
    return str(number) if number.denominator == 1 else f"{number.numerator}/{number.denominator}"


def _sum_of_amounts(answer: str) -> Quantity | None:
    """Add ``2小时30分`` or ``5 ft 6 in``: numbers whose units shrink within one dimension; None for anything else."""
    pieces = _NUMBERS.split(answer)
    amounts = len(pieces) // 2
    if not 2 <= amounts <= _MOST_AMOUNTS or pieces[0].strip():
        return None
    total, units = Fraction(0), list[Unit]()
    for number, spoken in zip(pieces[1::2], pieces[2::2], strict=True):
        words = [word for word in _words_of(list(_TOKENS.finditer(spoken))) if word != "and"]
        if units and words == ["\u5206"] and units[0].dimension == (("yuan", 1),):
            words = ["fen"]
        phrase = _phrase(words)
        unit = _unit(phrase.powers)
        if re.search(r"[^\w\s\\{},~]", spoken) or not phrase.readable or phrase.forms or unit is None:
            return None
        if len(unit.dimension) != 1 or not all(_singular(word) in UNITS or word in IGNORED for word in words):
            return None
        if units and (unit.dimension != units[0].dimension or unit.factor >= units[-1].factor):
            return None
        units.append(unit)
        total += Fraction(number) * unit.factor
    return Quantity(str(total / units[0].factor), units[0])


def _singular(name: str) -> str:
    if name in UNITS:
        return name
    lower = name.lower()
    return lower[:-1] if len(lower) > 2 and lower.endswith("s") and not lower.endswith("ss") else lower


def _unit(powers: Counter[str]) -> Unit | None:
    dimension, factor = Counter[str](), Fraction(1)
    for name, power in powers.items():
        if name and name not in IGNORED:
            base, size = UNITS.get(name, (name, Fraction(1)))
            dimension[base] += power
            factor *= size**power
    found = tuple(sorted((base, power) for base, power in dimension.items() if power))
    return Unit(found, factor) if found else None
