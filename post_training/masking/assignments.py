"""Find `NAME=value`, `"name": "value"` and `--name value` in a text if the name says that the value is a secret."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from post_training.masking.names import always_secret, names_secret, names_secret_in_prose, variable_holds_secret
from post_training.masking.shapes import MASK

# A name, its closing quote, and the assignment. The look-behind prevents trying a run of word characters twice.
_NAME = re.compile(
    r"(?<![\w./-])(?P<dashes>--)?(?P<name>[A-Za-z_][\w.-]{0,200})(?P<quote>\\?[\"']?)"
    r"(?P<sign>=(?!=)|[ \t]{1,3}=(?!=)[ \t]{0,3}|[ \t]{0,3}:(?!:|//)[ \t]{0,3}|(?(dashes)[ \t]{1,3}|(?!)))"
)
_QUOTED = re.compile(r"\"(?:[^\"\\\n]|\\.){0,20000}\"|'(?:[^'\\\n]|\\.){0,20000}'")
_ESCAPED_QUOTES = re.compile(r"\\\"[^\"\\\n]{0,20000}\\\"|\\'[^'\\\n]{0,20000}\\'")
_GROUP = re.compile(r"\[[^\]\n]{0,20000}\]?|\{[^}\n]{0,20000}\}?")
_BARE = re.compile(r"(?:\\.|[^\s'\"\\]){1,20000}")
_CLOSING = ",;.)]}>"
# Values that take the place of a secret, or that only say that there is none.
_NO_SECRET = re.compile(
    r"(?i)(?:bearer|basic|none|null|true|false|auto|yes|no|empty|missing|unset|~|\$\{.*|\$\w+|\*+.*)$"
)
_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?$")


def secret_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of every value whose name marks it as a secret, in order and without quotes."""
    if not any(sign in text for sign in ("=", ":", "--")):
        return
    behind = 0
    for match in _NAME.finditer(text):
        if match.start() < behind or not _is_secret(match):
            continue
        begin, end = _value(text, match)
        if end > begin and _is_worth_masking(match["name"], text[begin:end]):
            yield begin, end
            behind = end


def mask_assignments(text: str) -> str:
    """Return the text with every such value masked."""
    parts, behind = [], 0
    for begin, end in secret_spans(text):
        parts += [text[behind:begin], MASK]
        behind = end
    return "".join([*parts, text[behind:]]) if parts else text


def _is_secret(match: re.Match[str]) -> bool:
    sign, name = match["sign"].strip(), match["name"]
    if not sign:  # an option and its value
        return match["dashes"] == "--" and names_secret(name) and not match["quote"]
    # A word without quotes before a colon, or before a blank and an equals sign, may be prose or a line of source.
    if not match["quote"] and (sign == ":" or match["sign"][0] in " \t"):
        return names_secret_in_prose(name)
    return names_secret(name) or (name.isupper() and variable_holds_secret(name))


def _value(text: str, match: re.Match[str]) -> tuple[int, int]:
    """Return begin and end of the value; in a quoted word, such as 'a.password=b c', it ends with the quote."""
    start = match.end()
    for form, quote in ((_QUOTED, 1), (_ESCAPED_QUOTES, 2)):
        if quoted := form.match(text, start):
            return start + quote, quoted.end() - quote
    word = match.start()
    while word and text[word - 1] in "+~":  # prefixes of Hydra's, as in '+a.password=b c'
        word -= 1
    opener = text[word - 1] if word else ""
    if opener and opener in "'\"" and not match["quote"]:
        end = text.find(opener, start)
        return start, end if end >= 0 else len(text)
    found = _GROUP.match(text, start) or _BARE.match(text, start)
    if found is None:
        return start, start
    end = found.end()
    while end > start and text[end - 1] in _CLOSING and found.re is _BARE:
        end -= 1
    return start, end


def _is_worth_masking(name: str, value: str) -> bool:
    value = value.strip()
    if not value or value.startswith(MASK) or _NO_SECRET.match(value):
        return False
    if not names_secret(name) and value.startswith("/") and os.path.exists(value):
        return False  # the path of a key is no secret
    return always_secret(name) or not _NUMBER.match(value)
