r"""Values with units: ``12\text{ cm}``, ``5 dollars``, ``60^\circ``, ``\$20``.

A unit that one side leaves out does not count; two units must be the same, or convertible: 12 cm is 12 and 120 mm, and
not 12 m.
"""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from post_training.rewards.notation import MATHEMATICAL, is_product

# Every unit: its names, the base unit of its dimension, and what one of it is there.
_TABLE = """
mm millimeter millimetre       | m      | 1/1000
cm centimeter centimetre       | m      | 1/100
m meter metre                  | m      | 1
km kilometer kilometre         | m      | 1000
in inch inches                 | in     | 1
ft foot feet                   | in     | 12
yd yard                        | in     | 36
mi mile                        | in     | 63360
s sec second                   | s      | 1
min minute                     | s      | 60
h hr hour                      | s      | 3600
day                            | s      | 86400
week                           | s      | 604800
month                          | month  | 1
yr year                        | month  | 12
mg milligram                   | g      | 1/1000
g gram                         | g      | 1
kg kilogram                    | g      | 1000
oz ounce                       | oz     | 1
lb pound                       | oz     | 16
ml milliliter millilitre       | L      | 1/1000
L liter litre                  | L      | 1
cent                           | dollar | 1/100
dollar usd                     | dollar | 1
mph                            | mph    | 1
rad radian                     | rad    | 1
deg degree                     | degree | 1
C celsius                      | C      | 1
F fahrenheit                   | F      | 1
"""
_UNITS = {
    name: (base.strip(), Fraction(factor.strip()))
    for names, base, factor in (line.split("|") for line in _TABLE.strip().splitlines())
    for name in names.split()
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_LATER_POWERS = {"squared": 2, "cubed": 3}
_IGNORED = frozenset({"unit", "of", "the"})
_CURRENCIES = {"\\$": "dollar", "$": "dollar", "\u20ac": "euro", "\u00a3": "pound sterling", "\u00a5": "yen"}

# Every character belongs to one token, so that the time is linear in the length of what a model writes.
_TOKENS = re.compile(
    r"\\(?:text|textrm|textbf|textit|mathrm|mbox|hbox)\s?\{(?P<marked>[^{}]*)\}"
    r"|(?P<degree>\^?\{?\\(?:circ|degree)(?![a-zA-Z])\}?)"
    r"|(?P<gap>\\[,;:! ]|~|\s|\\(?:quad|cdot)(?![a-zA-Z]))"
    r"|(?P<power>\^(?:-?[0-9]|\{-?[0-9]\}))"
    r"|(?P<word>(?<![a-zA-Z\\])[a-zA-Z]+)"
    r"|(?P<slash>/)"
    r"|(?P<other>\\[a-zA-Z]+|\\.|.)",
    re.DOTALL,
)
_NUMERIC = re.compile(r"[0-9]|\\pi(?![a-zA-Z])")

Dimension = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Unit:
    """dimension: base units with their powers, sorted. factor: what one unit is in base units."""

    dimension: Dimension
    factor: Fraction


DEGREE = Unit((("degree", 1),), Fraction(1))
DOLLAR = Unit((("dollar", 1),), Fraction(1))


@dataclass(frozen=True)
class Quantity:
    """A value, as it was written, and its unit; None where there is none, or one that says nothing (``units``)."""

    value: str
    unit: Unit | None


def quantity(answer: str) -> Quantity:
    """Takes an answer apart; all of it is the value where no unit stands behind (or a currency before) a number."""
    for sign, name in _CURRENCIES.items():
        amount = answer.removeprefix(sign)
        if amount != answer and _NUMERIC.search(amount):
            rest = quantity(amount.strip())
            return Quantity(rest.value, rest.unit or _unit(Counter({name: 1})))
    tokens = list(_TOKENS.finditer(answer))
    first = _first_of_unit(tokens)
    value = answer[: tokens[first].start()] if first < len(tokens) else answer
    if first == len(tokens) or not _NUMERIC.search(value):
        return Quantity(answer, None)
    return Quantity(value.strip(), _unit(_powers(tokens[first:])))


def _first_of_unit(tokens: list[re.Match[str]]) -> int:
    """Where the unit at the end begins, gaps before it included; the number of tokens if there is none."""
    first = len(tokens)
    for position in range(len(tokens) - 1, -1, -1):
        before = tokens[position - 1].lastgroup if position else None
        match tokens[position].lastgroup:
            case "marked" | "degree":
                first = position
            case "word" if _is_unit(tokens[position]["word"], before):
                first = position
            case "gap":
                first = position if first == position + 1 else first
            case "slash" if first <= position + 2:
                continue
            case "power" if before in ("marked", "word"):
                continue
            case _:
                break
    return first


def _is_unit(word: str, before: str | None) -> bool:
    """Whether a word without markup is a unit: a known one (``12cm``), after a gap also a letter or any other word."""
    known = _singular(word) in _UNITS or word in _POWERS or word in _LATER_POWERS
    if before in ("slash", "degree"):
        return known
    if before == "gap":
        return known or not (is_product(word) or word.lower() in MATHEMATICAL)
    return known and len(word) > 1


def _powers(tokens: list[re.Match[str]]) -> Counter[str]:
    """Units with their powers: ``square feet per second`` is foot 2, second -1."""
    powers, sign, power, last = Counter[str](), 1, 1, ""
    spoken = " ".join("degree" if token["degree"] else token["marked"] or token.group() for token in tokens)
    for word in re.findall(r"[^\W\d_]+|/|\^\{?-?[0-9]", spoken):
        if word in ("/", "per"):
            sign = -1
        elif word in _POWERS:
            power = _POWERS[word]
        elif word in _LATER_POWERS or word[0] == "^":
            powers[last] *= _LATER_POWERS.get(word) or int(word.lstrip("^{"))
        else:
            last = _singular(word)
            powers[last] += sign * power
            power = 1
    return powers


def _singular(name: str) -> str:
    if name in _UNITS:
        return name
    lower = name.lower()
    return lower[:-1] if len(lower) > 2 and lower.endswith("s") and not lower.endswith("ss") else lower


def _unit(powers: Counter[str]) -> Unit | None:
    dimension, factor = Counter[str](), Fraction(1)
    for name, power in powers.items():
        if name and name not in _IGNORED:
            base, size = _UNITS.get(name, (name, Fraction(1)))
            dimension[base] += power
            factor *= size**power
    found = tuple(sorted((base, power) for base, power in dimension.items() if power))
    return Unit(found, factor) if found else None
