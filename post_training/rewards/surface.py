r"""Remove surroundings that do not change an answer: full-width forms, spaces, markup, a label such as ``Answer:``.

Every function here reads its text once; `bare` does so a fixed number of times.
"""

import re

# Full-width ASCII, the ideographic space and Chinese punctuation, as a Chinese keyboard writes them.
_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_PUNCTUATION = {
    "\uff5e": r"\sim ", "\u3000": " ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "", "\ufeff": "",
    "\u3001": ",", "\u3002": ".", "\u3010": "[", "\u3011": "]", "\u3014": "(", "\u3015": ")", "\u2018": "'",
    "\u2019": "'", "\u201c": '"', "\u201d": '"', "\uffe5": "\u00a5", "\u2236": ":", "\u2261": r"\equiv ",
    "\u211d": r"\mathbb{R}",
}  # fmt: skip
_TRANSLATED = _WIDE | {ord(found): meant for found, meant in _PUNCTUATION.items()}
_RAISED = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207a", "0123456789-+")
_RAISED_RUN = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b\u207a]+")
# \\ ends a line of a matrix, so its second backslash does not begin a \, or \ .
_SPACES = re.compile(
    r"(?P<line>\\\\)|(?P<nothing>\\!)"
    r"|(?:\\[ ,;:\n\t]|~|\\(?:q?quad|enspace|enskip|thinspace|medspace|thickspace|space|hfill)(?![a-zA-Z])|&nbsp;"
    r"|\\(?:[hv]space|phantom)\s?\*?\s?\{[^{}]*\}|\\checkmark(?![a-zA-Z])|[\u2713\u2714]|\s)"
)
_RUN_OF_SPACES = re.compile(" {2,}")
_MARKUP = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|bfseries|itshape|bf|rm|it|tiny|small|normalsize|large"
    r"|Large|LARGE|huge|Huge)(?![a-zA-Z]) ?|\\color ?\{[^{}]*\} ?"
)
_COMMANDS = frozenset(
    "boxed fbox framebox mathbf boldsymbol bm pmb underline mathit mathnormal mathrm text textbf textit textrm textsf "
    "texttt mathsf emph ensuremath mbox hbox bold".split()
)
_COMMAND = re.compile(r"\\([a-zA-Z]+) ?\{|(\{)")
_TEXT_COLOR = re.compile(r"\\(?:textcolor|colorbox) ?\{[^{}]*\} ?(?=\{)")
_LABEL = re.compile(
    r"(?:\\(?:text|textbf|mathrm|mathbf) ?\{ ?)?(?P<marks>[*_]{1,3} ?)?"
    r"(?:(?:so |thus |therefore |hence )?,? ?(?:the |my )?(?:final |correct |right )?(?:answer|ans\.?|result)"
    r"(?: is(?=[ :}*]| *$)| ?=| ?(?=[:}*]))"
    r"|(?:\u6700\u7ec8)?(?:\u7b54\u6848|\u7ed3\u679c|\u7b54)(?:[\u662f\u4e3a]|(?=[:}*]))|\u9009\u9879?(?=[A-J]$)|[\u4e00\u603b]?\u5171(?:\u6709)?(?=[0-9]))"
    r"(?(marks)(?: ?[*_]{1,3})?) ?:? ?(?P<closed>\})?(?(marks)(?: ?[*_]{1,3})?) ?:? ?",
    re.IGNORECASE,
)
_NEGATIVE = re.compile(r"(?:negative |minus |\u8d1f(?: ?))(?=[0-9.\\$])", re.IGNORECASE)
_PAIRS = (
    ("**", "**"), ("*", "*"), ("__", "__"), ("`", "`"), ("<b>", "</b>"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"),
    (r"\[", r"\]"), ('"', '"'), ("'", "'"),
)  # fmt: skip
_MOST_LAYERS = 12


def level(text: str) -> str:
    """Return `text` in half-width characters, with one blank per run of spaces of any kind and none around it."""
    text = text.translate(_TRANSLATED)
    text = _RAISED_RUN.sub(lambda match: f"^{{{match.group().translate(_RAISED)}}}", text)
    if text.endswith("\\") and not text.endswith("\\\\"):
        text = text[:-1]  # a control space whose blank was stripped
    text = _SPACES.sub(lambda match: match["line"] or ("" if match["nothing"] else " "), text)
    return _RUN_OF_SPACES.sub(" ", text).strip()


def bare(text: str) -> str:
    """Strip a `level` text of layers of markup around all of it, a label before it and punctuation after it."""
    text = _NEGATIVE.sub("-", _MARKUP.sub("", text)) if _NEGATIVE.match(text) else _MARKUP.sub("", text)
    text = _TEXT_COLOR.sub("", text).strip()
    for _ in range(_MOST_LAYERS):
        inner = _unlabelled(_unmarked(_unpaired(_uncommanded(text)))).strip()
        if inner == text or not inner:
            break
        text = inner
    return text


def _uncommanded(text: str) -> str:
    r"""Remove ``\mathbf{...}`` or ``{...}`` around the whole text; words keep their ``\text``."""
    match = _COMMAND.match(text)
    if match is None or not text.endswith("}") or (match[1] and match[1] not in _COMMANDS):
        return text
    inner = text[match.end() : -1]
    if not _is_balanced(inner):
        return text
    # Letters are words in \text{...} and variables outside it: \text{on} is not a product.
    return text if match[1] and not any(map(str.isdigit, inner)) else inner


def _is_balanced(text: str) -> bool:
    depth, skip = 0, False
    for character in text:
        if skip:
            skip = False
        elif character == "\\":
            skip = True
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if depth < 0:
                return False
    return depth == 0 and not skip


def _unpaired(text: str) -> str:
    for opening, closing in _PAIRS:
        inner = text[len(opening) : len(text) - len(closing)]
        if inner and text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing):
            # In $1$ and $2$ the first sign does not pair with the last.
            if opening not in inner and closing not in inner:
                return inner.strip()
            if opening == "$$" and not inner.strip("$"):
                return inner
    return text


def _unmarked(text: str) -> str:
    """Remove punctuation at the end; the mark of a factorial stays."""
    shorter = text.rstrip(" .,;") if text.endswith((".", ",", ";")) else text
    return text if shorter.endswith("\\") or not shorter else shorter


def _unlabelled(text: str) -> str:
    match = _LABEL.match(text)
    if match is None or match.end() == len(text):
        return text
    rest = text[match.end() :]
    opened = match.group().startswith("\\") and not match["closed"]
    return rest[:-1] if opened and rest.endswith("}") else text if opened else rest
