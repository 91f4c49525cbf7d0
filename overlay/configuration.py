"""Read a group of configuration keys into a dataclass: unknown keys and wrong values are errors that name the key."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin, get_type_hints

from overlay.errors import SettingsError

_IN_A_CONFIGURATION = {Sequence: "list", Mapping: "group of keys"}


def read_section(cls: type, node: Any, key: str, elsewhere: Collection[str] = ()) -> dict[str, Any]:
    """Read the values for the fields of a dataclass from a mapping; a key that is absent or null gets its default.

    Types are checked: an int also passes as a float, a bool never as a number, a `Literal` takes its values only, and a
    field with `metadata={"at_least": number}` nothing below it. A field whose type is a dataclass is a group of keys.

    Args:
        cls: the dataclass.
        node: a mapping, such as a DictConfig.
        key: the full key of `node`, for messages.
        elsewhere: fields that do not come from here.

    Raises:
        SettingsError: an unknown key, or a value of the wrong kind.
    """
    if not isinstance(node, Mapping):
        raise SettingsError(f"{key} must be a group of keys, not {node!r}")
    kinds = get_type_hints(cls)
    allowed = [each for each in fields(cls) if each.name not in elsewhere]
    unknown = sorted(set(node) - {each.name for each in allowed})
    if unknown:
        names = [each.name for each in allowed]
        meant = get_close_matches(unknown[0], names, n=1)
        advice = f"; did you mean {meant[0]}?" if meant else ""
        raise SettingsError(f"unknown key {key}.{unknown[0]}; allowed keys are {', '.join(names)}{advice}")
    return {each.name: _value(each, kinds[each.name], node, key) for each in allowed}


def checked(value: Any, kind: Any, key: str) -> Any:
    """Return `value` if it is of `kind` (a class or a `Literal`).

    Raises:
        SettingsError: it is not.
    """
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise SettingsError(f"{key}={value!r} is invalid. Set it to one of {', '.join(map(str, get_args(kind)))}")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        name = _IN_A_CONFIGURATION.get(kind, kind.__name__)
        raise SettingsError(f"{key}={value!r} is invalid. Set it to a value of type {name}")
    return value


def defaults(cls: type) -> dict[str, Any]:
    """Return the keys of a section with their default values, as a configuration file would write them."""
    found = {each.name: _default(each) for each in fields(cls)}
    return {
        name: json.dumps(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value)
        for name, value in found.items()
    }


def _default(spec: Field[Any]) -> Any:
    if spec.default_factory is not MISSING:
        return spec.default_factory()
    return spec.default


def _value(spec: Field[Any], kind: Any, node: Mapping[str, Any], key: str) -> Any:
    given = node.get(spec.name)
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**read_section(kind, {} if given is None else given, f"{key}.{spec.name}"))
    if given is None:
        return _default(spec)
    value = checked(given, kind, f"{key}.{spec.name}")
    at_least = spec.metadata.get("at_least")
    if at_least is not None and value < at_least:
        raise SettingsError(f"{key}.{spec.name}={value} is invalid. Set it to at least {at_least}")
    return value
