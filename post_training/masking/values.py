"""Mask secrets in configurations and texts: by name, by form, and the values of this process's variables anywhere."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from post_training.masking.assignments import mask_assignments
from post_training.masking.names import always_secret, names_secret, variable_holds_secret
from post_training.masking.shapes import MASK, mask_shapes

# Values of at least `_LONG` characters are masked within words too; shorter ones, from `_SHORTEST` on, as whole words.
_LONG, _SHORTEST = 8, 5
_PLACEHOLDERS = frozenset("empty dummy false local none secret token token-abc123 prompt default disabled".split())
_WORD_CHARACTER = "[A-Za-z0-9_]"


class Secrets:
    """The secret values of one process, masked wherever they occur in text.

    Args:
        environment: variables; the values of those whose names mark secrets are masked (default: this process's).
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        self._values: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        for name, value in variables.items():
            if variable_holds_secret(name) and not os.path.exists(value):  # the path of a secret is not one itself
                self._keep(value)

    def learn(self, config: Any) -> None:
        """Mask from now on, wherever they occur, the values whose names in this configuration mark them as secrets."""
        for value in _secret_leaves(config):
            self._keep(str(value))

    def text(self, text: str) -> str:
        """Return a text with `***` for every secret; unchanged if there is none."""
        if self._pattern is not None:
            text = self._pattern.sub(MASK, text)
        return mask_assignments(mask_shapes(text))

    def value(self, value: Any) -> Any:
        """Return a copy of plain values (mappings, lists, texts, numbers) without secrets; tuples become lists."""
        if isinstance(value, Mapping):
            return {
                self.text(name) if isinstance(name, str) else name: _hidden(name, each)
                if _names_secret(name, each)
                else self.value(each)
                for name, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        return self.text(value) if isinstance(value, str) else value

    def _keep(self, value: str) -> None:
        """Add a value, its lines if it has several, and its forms in JSON and in addresses."""
        parts = {value.strip(), *(line.strip() for line in value.splitlines() if len(line.strip()) >= 2 * _LONG)}
        for part in parts:
            if len(part) < _SHORTEST or part.lower() in _PLACEHOLDERS or set(part) <= {"*"}:
                continue
            if len(part) < _LONG and (part.isdigit() or not part.isprintable()):
                continue
            self._values |= {
                part,
                json.dumps(part)[1:-1],
                json.dumps(part, ensure_ascii=False)[1:-1],
                quote(part, safe=""),
            }
        # The longest first: one secret may begin with another.
        ordered = sorted(self._values, key=lambda each: (-len(each), each))
        self._pattern = re.compile("|".join(map(_as_pattern, ordered))) if ordered else None


def masked(value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Return a copy of a configuration of plain values with `***` for every secret.

    A secret is any value under a key that names one (`api_key`, `DB_PASSWD`, ...), text in the form of one (tokens of
    well-known services, the user of an address, headers, web hooks) and, anywhere, the value of a variable of the
    `environment` (default: this process's) whose name marks it as secret.

    For example {"api_key": "abc", "proxy": "http://me:pw@host"} becomes {"api_key": "***", "proxy": "http://***@host"}.
    """
    secrets = Secrets(environment)
    secrets.learn(value)
    return secrets.value(value)


def masked_text(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Do the same for a text, such as a log or a command; `NAME=value` in it counts as a key with its value."""
    return Secrets(environment).text(text)


def _as_pattern(value: str) -> str:
    escaped = re.escape(value)
    return escaped if len(value) >= _LONG else f"(?<!{_WORD_CHARACTER}){escaped}(?!{_WORD_CHARACTER})"


def _names_secret(name: Any, value: Any) -> bool:
    """Return whether the name marks the value as a secret; for a number it must be a name that always does."""
    if not isinstance(name, str) or value is None or isinstance(value, bool) or value == "":
        return False
    return always_secret(name) if isinstance(value, int | float) else names_secret(name)


def _hidden(name: Any, value: Any) -> Any:
    """Return the value with all its leaves masked, which still shows how many there were."""
    if isinstance(value, Mapping):
        return {key: _hidden(key, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(name, each) for each in value]
    return value if value is None or isinstance(value, bool) or value == "" else MASK


def _secret_leaves(config: Any, is_secret: bool = False) -> Iterator[str | int | float]:
    if isinstance(config, Mapping):
        for name, each in config.items():
            yield from _secret_leaves(each, is_secret or _names_secret(name, each))
    elif isinstance(config, list | tuple):
        for each in config:
            yield from _secret_leaves(each, is_secret)
    elif is_secret and isinstance(config, str):
        yield config
