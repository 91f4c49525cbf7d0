r"""Take apart an answer that is not plain mathematics: a choice, words, a value with a unit, an equation.

math-verify reads every letter as a variable: ``Listen`` and ``Silent`` are equal products there, ``12 cm`` and ``12 m``
lose their units, and ``8=7`` is 7. So such notation is handled here, and math-verify only gets values.
"""

import re
from dataclasses import dataclass

from post_training.rewards.conditions import EVERYTHING, elements, in_one_notation, means_everything

_WRAPPED = re.compile(
    r"\\(?:text|textbf|textrm|textit|textsf|mathrm|mathbf|mathit|mbox|hbox|operatorname)\s*\{([^{}]*)\}"
)
_SPACING = re.compile(r"\\[,;:! ]|~|\\q?quad(?![a-zA-Z])")
_LETTERS = re.compile(r"[^\W\d_]+")

# Symbols that have several notations, with the one that is used here.
_SAME = {
    "\u2212": "-", "\u00b0": r"^\circ", "\u2205": r"\emptyset", r"\varnothing": r"\emptyset", "\u221e": r"\infty",
    "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00d7": r"\times ", "\u00b7": r"\cdot ",
    "\u03c0": r"\pi ", "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}",
}  # fmt: skip
# An en dash before a number is a minus sign, as word processors write it.
_EN_DASH = re.compile(r"\u2013(?= ?(?:\.?[0-9]|\\(?:[dt]?frac|sqrt)(?![a-zA-Z])))")
_RUN_OF_BLANKS = re.compile(" {2,}")
_SAME_PATTERN = re.compile("|".join(map(re.escape, _SAME)) + r"(?![a-zA-Z])")
_NOTHING = re.compile("(?:the )?empty set|no (?:real )?solutions?|\u65e0(?:\u5b9e\u6570)?\u89e3|\u7a7a\u96c6")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*")
_PERCENT_WORD = re.compile(r"(?:\\text\s?\{\s?(?:percent(?:age)?|pct)\s?\}|(?:percent(?:age)?|pct))$")
_ORDINAL = re.compile(r"(?<=[0-9])(?:\^?\{?\\(?:text|mathrm)\s?\{\s?(?:st|nd|rd|th)\s?\}\}?|st|nd|rd|th)$")
_OUTWARD = re.compile(r"\s*([\[\](])([^\[\]()]*)([\[\])])\s*")
_ROOT_SIGN = re.compile(r"\u221a ?(?:(?P<number>[0-9]+|[a-z])|\((?P<inner>[^()]*)\))")
_HALF_MORE = re.compile(r"(?<=[0-9])(?:\\text ?\{)? ?and (?:a|one) (?P<part>half|quarter|third)(?P<rest>[^{}]*)\}?$")
_HALF_MORE_PARTS = {"half": "1/2", "quarter": "1/4", "third": "1/3"}
_PARTS_OF = re.compile(r"([0-9]+) ?\u5206\u4e4b ?([0-9]+)")
_EXCEPT = re.compile(
    r"(?:\\text ?\{ ?)?all real (?:numbers|values),? ?(?:except|other than|excluding)(?: for)? ?\}? ?"
    r"(-?[^{}a-z]{1,40})\}?$"
)
_BELOW_ZERO = re.compile(r"\u96f6\u4e0b(?=[0-9])")


def uniform(answer: str) -> str:
    r"""Rewrite an answer in one of several notations: ``\varnothing`` and ``no solution``, ``10th``, ``]1,2[``."""
    text = _SAME_PATTERN.sub(lambda match: _SAME[match.group()], _EN_DASH.sub("-", answer))
    # 3 × 10^8 has a blank behind the sign, and its command has one too.
    text = _SIZES.sub("", _RUN_OF_BLANKS.sub(" ", text))
    # \text{5 cm} is 5 cm.
    text = _WRAPPED.sub(lambda match: match[1] if any(map(str.isdigit, match[1])) else match.group(), text)
    if (said := words(text)) is not None:
        if _NOTHING.fullmatch(said):
            return r"\emptyset"
        if means_everything(said):
            return EVERYTHING
        return text.strip()
    text = _ROOT_SIGN.sub(lambda match: rf"\sqrt{{{match['number'] or match['inner']}}}", text)
    text = _EXCEPT.sub(r"\\mathbb{R}\\setminus\\{\1\\}", text)
    text = _BELOW_ZERO.sub("-", _PARTS_OF.sub(r"\\frac{\2}{\1}", text))
    text = _HALF_MORE.sub(lambda match: f" {_HALF_MORE_PARTS[match['part']]}{match['rest']}", text)
    text = in_one_notation(text.strip())
    text = _ORDINAL.sub("", text.strip())
    if (percent := _PERCENT_WORD.search(text)) is not None:
        text = text[: percent.start()].rstrip(" \t\n~\\") + r"\%"
    return r"\cup".join(_inward(part) for part in text.split(r"\cup")).strip()


def _inward(interval: str) -> str:
    """Turn ``]1,2[`` into ``(1,2)``: an outward bracket excludes its end."""
    match = _OUTWARD.fullmatch(interval)
    if match is None or "," not in match[2] or not (match[1] == "]" or match[3] == "["):
        return interval
    return f"{'(' if match[1] == ']' else match[1]}{match[2]}{')' if match[3] == '[' else match[3]}"


@dataclass(frozen=True)
class Choice:
    """An answer to a multiple choice question: its letter, its value, or both."""

    letter: str | None
    value: str | None


_CHOICE = re.compile(
    r"(?:\\(?:text|textbf|textrm|mathrm|mathbf|bf)\s*\{\s*\(?(?P<wrapped>[A-J])(?P<end>[).:])?\s*\}"
    r"|\((?P<plain>[A-J])\)|(?P<marked>[A-J])[.)](?=\s|\\|$))"
    r"(?:\\[,;:! ]|~|\s|\\quad)*(?P<value>.*)",
    re.DOTALL,
)


def choice(answer: str) -> Choice:
    r"""Split ``\textbf{(C)}\ 5``, ``(C) 5``, ``C) 5``, ``\text{C}`` or ``C``; any other answer is all value."""
    match = _CHOICE.fullmatch(answer)
    if match is None or (match["wrapped"] and not match["end"] and match["value"]):
        return Choice(answer if re.fullmatch("[A-J]", answer) else None, answer)
    return Choice(match["wrapped"] or match["plain"] or match["marked"], match["value"] or None)


# Names that may be written without a backslash but are not words.
MATHEMATICAL = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp lim max min gcd lcm mod det dim ker deg "
    "arg pi inf infty infinity oo sqrt cbrt abs frac or and".split()
)
# Letters that occur together in products.
_VARIABLES = [frozenset("abcduvwxyz"), frozenset("klmn"), frozenset("pqrst")]


def is_chinese(run: str) -> bool:
    """Return whether a run of letters is Chinese."""
    return "\u3400" <= run[0] <= "\u9fff"


def is_product(run: str) -> bool:
    """Return whether letters are a product of variables (``xy``, ``mn``, ``AB``), not a word (``no``, ``cat``)."""
    if is_chinese(run):
        return False
    if len(run) == 1 or (run.isupper() and len(run) <= 3):
        return True
    return len(set(run)) == len(run) and any(letters.issuperset(run) for letters in _VARIABLES)


def words(answer: str) -> str | None:
    r"""Return the text of an answer that consists of words, without markup and in lower case; None for any other."""
    bare = _SPACING.sub(" ", _WRAPPED.sub(r" \1 ", answer))
    if re.search(r"[0-9=<>^_{}\\+*/|$%]", bare):
        return None
    runs = _LETTERS.findall(bare)
    named = [run for run in runs if run.lower() in MATHEMATICAL]
    wrapped = {run for match in _WRAPPED.finditer(answer) for run in _LETTERS.findall(match[1]) if len(run) > 1}
    if not any(run in wrapped or not is_product(run) for run in runs if run not in named):
        return None
    if any(run.lower() not in ("or", "and") for run in named) and not wrapped:
        return None
    if any(is_chinese(run) for run in runs):
        return _CHINESE_AND.sub(",", "".join(bare.split())).rstrip(".!,")
    return " ".join(bare.replace("'", "").split()).rstrip(".!").casefold()


_CHINESE_AND = re.compile("[\u548c\u4e0e\u53ca\u6216;,]|\u4ee5\u53ca")
_LETTER_LIST = re.compile(r"[A-J](?:(?:[,; ]|\\text ?\{ ?and ?\}|and|\u548c)*[A-J]){1,9}")


def letters(answer: str) -> frozenset[str] | None:
    """Return the letters of several choices, ``A, B, D`` or ``ABD``; None for anything else or a repeated letter."""
    if _LETTER_LIST.fullmatch(answer) is None:
        return None
    found = re.findall(r"[A-J]", answer)
    return frozenset(found) if len({*found}) == len(found) else None


def listed(answer: str) -> str:
    r"""Return ``1 or 2`` and ``1\text{ and }2`` as ``1,2``, unless a part of it is a condition."""
    parts = [part.strip() for part in _CONJUNCTIONS.split(answer)]
    if len(parts) == 1 or not all(parts) or _RELATIONS.search(answer) or len(elements(answer)) > len(parts) * 4:
        return answer
    return ",".join(parts)


_CONJUNCTIONS = re.compile(
    r",? ?\\text ?\{ ?,? ?(?:or|and|[\u6216\u548c\u4e0e]) ?\}|,? ?(?<![a-zA-Z\\])(?:or|and)(?![a-zA-Z])"
    "|[\u6216\u548c\u4e0e]"
)
_RELATIONS = re.compile(r"[<>\[\]()]|\\(?:le|ge|ne|lt|gt|leq|geq|neq|in|cup|cap)(?![a-zA-Z])")
_EQUALS = re.compile(r"(?<![<>!:\\])=(?!=)")
_MOST_SIDES = 8


def sides(answer: str) -> list[str]:
    """Return the sides of ``x = 2+3 = 5``; anything but a single equation is one side."""
    if re.search(r"[,;<>]|\\(?:le|ge|ne|lt|gt|leq|geq|neq|approx|in|text|begin)(?![a-zA-Z])|\\(?:equiv|pmod)", answer):
        return [answer]
    parts = [part.strip() for part in _EQUALS.split(answer)]
    return parts if all(parts) and len(parts) <= _MOST_SIDES else [answer]


def is_number(expression: str) -> bool:
    r"""Return whether an expression is a number, because it has no variable: ``8``, ``2+3``, ``\sqrt{49}``."""
    return re.search(r"[^\W\d_]", re.sub(r"\\[a-zA-Z]+", " ", expression)) is None and any(map(str.isdigit, expression))


_TWO_DIGITS = re.compile(r"\\[dt]?(?:frac|binom) ?[0-9] ?[0-9]")
# The 2 of \log_2 8 belongs to the name before it.
_APART = re.compile(r"(?<![0-9_^.])[0-9][0-9.]* [0-9.]+(?! ?/|[0-9.])")


def has_numbers_apart(expression: str) -> bool:
    r"""Return whether two numbers are adjacent: math-verify would add ``12 34`` like the parts of ``2 1/3``."""
    return _APART.search(_TWO_DIGITS.sub(" ", expression)) is not None


def is_set_beside_tuple(truth: str, answer: str) -> bool:
    r"""Return whether one is ``\{1,2\}`` and the other ``(1,2)``, which math-verify treats as equal."""
    kinds = {_brackets(truth), _brackets(answer)}
    return len(kinds) == 2 and "set" in kinds and None not in kinds


def _brackets(answer: str) -> str | None:
    if answer.startswith(r"\{") and answer.endswith(r"\}"):
        return "set"
    return "tuple" if "," in answer and re.fullmatch(r"[(\[][^()\[\]]*[)\]]", answer) else None
