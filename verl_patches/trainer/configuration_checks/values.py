"""Checks every value of the composed configuration against its type and range, before anything else reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from overlay import ConfigurationError
from verl_patches.features.settings import NODE
from verl_patches.trainer.configuration_checks.backends import SCHEMAS, backend_of
from verl_patches.trainer.configuration_checks.names import schema_keys, unknown_key
from verl_patches.trainer.configuration_checks.schema import field_at, group_of

_SHOWN_CHARACTERS = 80
_A_GROUP = "it should be a group of keys"
_ABSENT = "{key} was removed, but every run reads it. Leave it in the configuration"


def resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration as plain values, every reference followed.

    Raises:
        ConfigurationError: a reference leads nowhere, or a mandatory value is not given.
    """
    if not OmegaConf.is_config(config):
        return dict(config)
    try:
        return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        _require_groups(config)
        key, cause = error.full_key or "the configuration", str(error.msg or error).splitlines()[0]
        raise ConfigurationError(
            f"{key} refers to a value that cannot be resolved ({cause}). Correct the ${{...}} in it"
        ) from error
    except RecursionError as error:
        raise ConfigurationError("a ${...} of the configuration refers to itself. Correct it") from error


def _require_groups(config: Mapping[str, Any]) -> None:
    """Report a missing group itself, rather than the references into it.

    Raises:
        ConfigurationError: a required group is missing or holds a single value.
    """
    raw = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    schema = SCHEMAS[backend_of(raw)]
    for key in sorted(schema_keys(schema)):
        field = field_at(key.split("."), schema)
        if field is None or not field.is_required() or (group_of(field) is None and key != NODE):
            continue
        node: Any = raw
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                raise ConfigurationError(_ABSENT.format(key=key))
            node = node[part]
        if not isinstance(node, dict | str):
            raise ConfigurationError(f"{key}={shown(node)} is invalid: {_A_GROUP}")


def check_values(config: Mapping[str, Any]) -> None:
    """Check plain values against the schema of their back-end.

    Raises:
        ConfigurationError: a key is unknown or missing, or its value is of the wrong type or out of range; the sentence
            names key, value and remedy. A misspelt key is named before a wrong value.
    """
    schema = SCHEMAS[backend_of(config)]
    try:
        schema.model_validate(config)
    except ValidationError as error:
        found = error.errors(include_url=False)
        first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
        raise ConfigurationError(_sentence(first, schema)) from error


def _sentence(error: Mapping[str, Any], schema: type[BaseModel]) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return unknown_key(*_first_value(key, error["input"]))
    if error["type"] == "missing":
        return _ABSENT.format(key=key)
    groups = ("model_type", "model_attributes_type", "dict_type")
    expected = _A_GROUP if error["type"] in groups else re.sub("^(Input|Value)", "it", error["msg"])
    remedy = _remedy(error["loc"], schema)
    return f"{key}={shown(error['input'])} is invalid: {expected}" + (f"; {remedy}" if remedy else "")


def _first_value(key: str, value: Any) -> tuple[str, str]:
    """Return the key and value of a group's first leaf; of a single value, its own key and itself."""
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key, shown(value)


def _remedy(place: tuple[str | int, ...], schema: type[BaseModel]) -> str | None:
    """Return the description of the field at a place in the configuration; an element of a list has its list's."""
    field = field_at((part for part in place if isinstance(part, str)), schema)
    return field.description if field else None


def shown(value: Any) -> str:
    """Return a value on one line, as a user would write it, shortened to 80 characters."""
    text = value if isinstance(value, str) and value.isprintable() and value else _as_json(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError):
        return repr(value)
