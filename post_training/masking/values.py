"""Masks secrets in configurations and texts: by name, by form, and the values of this process's variables anywhere."""

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

# A value of so many characters is masked within a word too; a shorter one, down to the second number, as a whole word.
_LONG, _SHORTEST = 8, 5
_PLACEHOLDERS = frozenset("empty dummy false local none secret token token-abc123 prompt default disabled".split())
_WORD_CHARACTER = "[A-Za-z0-9_]"


class Secrets:
    """The values that are secret for one process, masked wherever they stand as text.

    Args:
        environment: variables; the values of those whose name means a secret are masked (default: this process's).
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        self._values: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        for name, value in variables.items():
            if variable_holds_secret(name) and not os.path.exists(value):  # a path leads to a secret and is none
                self._keep(value)

    def learn(self, config: Any) -> None:
        """Masks from now on what the names of a configuration call secret, wherever else it stands."""
        for value in _secret_leaves(config):
            self._keep(str(value))

    def text(self, text: str) -> str:
        """A text in which `***` stands for every secret; as it was where there is none."""
        if self._pattern is not None:
            text = self._pattern.sub(MASK, text)
        return mask_assignments(mask_shapes(text))

    def value(self, value: Any) -> Any:
        """A copy of plain values (mappings, lists, texts, numbers) without secrets; tuples become lists."""
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
        """Adds a value, its lines where it has several, and the forms in which JSON and addresses write it."""
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
    """A copy of a configuration of plain values in which `***` stands for every secret.

    A secret is what stands under a key that names one (`api_key`, `DB_PASSWD`, ...), what has the form of one (tokens
    of well-known services, the user of an address, headers, web hooks), and, anywhere, the value of a variable of the
    `environment` (default: this process's) whose name says so.

    For example {"api_key": "abc", "proxy": "http://me:pw@host"} becomes {"api_key": "***", "proxy": "http://***@host"}.
    """
    secrets = Secrets(environment)
    secrets.learn(value)
    return secrets.value(value)


def masked_text(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The same for a text, such as a log or a command; `NAME=value` in it counts as a key with its value."""
    return Secrets(environment).text(text)


def _as_pattern(value: str) -> str:
    escaped = re.escape(value)
    return escaped if len(value) >= _LONG else f"(?<!{_WORD_CHARACTER}){escaped}(?!{_WORD_CHARACTER})"


def _names_secret(name: Any, value: Any) -> bool:
    """Whether a value stands under a name for a secret; a number does only where the name leaves nothing else."""
    if not isinstance(name, str) or value is None or isinstance(value, bool) or value == "":
        return False
    return always_secret(name) if isinstance(value, int | float) else names_secret(name)


def _hidden(name: Any, value: Any) -> Any:
    """The value with all its leaves masked, so that the page still shows how many there were."""
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
