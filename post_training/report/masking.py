"""Keeping secrets out of what a run writes about itself."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_SECRET_NAME = re.compile(
    r"(^|_)(secret|webhook|password|passwd|credentials?|api_?key|access_?key|secret_?key|private_?key"
    r"|(access|api|auth|bearer|hf)_token)$|^token$",
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)(_ID)?$")
_USER_IN_ADDRESS = re.compile(r"(://)[^/@\s]+@")
# A shorter value of a variable is a switch or a number, and would be found in many a word.
_SHORTEST_SECRET = 8


def masked(value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """A copy of a configuration of plain values in which `***` stands for every secret.

    A secret is text under a key that names one (`api_key`, `password`, ...), the user and password of an address, and,
    anywhere, the value of a variable of the `environment` (default: this process's) that names one.

    For example {"api_key": "abc", "proxy": "http://me:pw@host"} becomes {"api_key": "***", "proxy": "http://***@host"}.
    """
    variables = os.environ if environment is None else environment
    found = (text for name, text in variables.items() if _SECRET_VARIABLE.search(name))
    secrets = sorted((text for text in found if len(text) >= _SHORTEST_SECRET), key=len, reverse=True)
    return _masked(value, secrets)


def _masked(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {name: MASK if _is_secret(name, each) else _masked(each, secrets) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(each, secrets) for each in value]
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, MASK)
    return _USER_IN_ADDRESS.sub(rf"\1{MASK}@", value)


def _is_secret(name: Any, value: Any) -> bool:
    return isinstance(value, str) and bool(value) and _SECRET_NAME.search(str(name)) is not None
