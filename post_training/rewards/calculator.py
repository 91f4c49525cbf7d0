r"""Turn calculator syntax into LaTeX: ``7*sin(pi*x/5)`` is ``7\cdot \sin(\pi \cdot x/5)``, ``sqrt(2)`` ``\sqrt{2}``."""

import re

_FUNCTIONS = {
    "sqrt": (r"\sqrt{", "}"), "cbrt": (r"\sqrt[3]{", "}"), "exp": ("e^{", "}"), "abs": (r"\left|", r"\right|"),
    "log10": (r"\log_{10}(", ")"), "log2": (r"\log_{2}(", ")"),
    **{name: (rf"\{name}(", ")") for name in "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log"
       .split()},
    **{f"a{name}": (rf"\arc{name}(", ")") for name in ("sin", "cos", "tan")},
}  # fmt: skip
_NAMES = "|".join(sorted(_FUNCTIONS, key=len, reverse=True))
_TOKENS = re.compile(
    rf"(?P<function>(?<![a-zA-Z\\])(?:{_NAMES}) ?\()|(?P<root>\\sqrt ?\()|(?P<power>\^ ?\(|\*\* ?\()"
    r"|(?P<bare>(?<![a-zA-Z\\])sqrt ?(?=[0-9{]))|(?P<named>(?<![a-zA-Z\\])(?:sin|cos|tan|cot|ln|log) (?=[a-z0-9\\]))"
    r"|(?P<open>\()|(?P<close>\))|(?P<pi>(?<![a-zA-Z\\])pi(?![a-zA-Z]))|(?P<caret>\*\*)|(?P<times>\*)"
    r"|(?P<infinity>(?<![a-zA-Z\\])(?:oo|inf|infinity)(?![a-zA-Z]))"
)
_PLUS_MINUS = re.compile(r"\+ ?-(?= ?[0-9a-zA-Z\\(])")
_MIXED = re.compile(r"(?<![0-9_^.])([0-9]+) ([0-9]+) ?/ ?([0-9]+)(?![0-9.])")
_IMAGINARY = re.compile(r"(?<=[0-9])[ij](?![a-zA-Z])")


def as_latex(text: str) -> str:
    """Return `text` with calculator syntax converted to LaTeX; unbalanced parentheses are left as they are."""
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _IMAGINARY.sub(" i", _PLUS_MINUS.sub("-", text))
    written: list[str] = []
    closing: list[str] = []
    last = 0
    for match in _TOKENS.finditer(text):
        written += [text[last : match.start()], _replaced(match, closing)]
        last = match.end()
        if written[-1] is _UNBALANCED:
            return text
    return text if closing else "".join([*written, text[last:]])


_UNBALANCED = "unbalanced"
_ALONE = {"pi": r"\pi ", "caret": "^", "times": r"\cdot ", "infinity": r"\infty "}


def _replaced(match: re.Match[str], closing: list[str]) -> str:
    """Return the LaTeX for a token; `closing` holds the closing text of each open parenthesis."""
    kind = match.lastgroup or ""
    if kind in _ALONE:
        return _ALONE[kind]
    if kind in ("bare", "named"):
        return f"\\{match.group()}"
    if kind == "close":
        return closing.pop() if closing else _UNBALANCED
    opened, closed = {
        "open": ("(", ")"), "root": (r"\sqrt{", "}"), "power": ("^{", "}"),
    }.get(kind) or _FUNCTIONS[match.group().rstrip(" (")]  # fmt: skip
    closing.append(closed)
    return opened
