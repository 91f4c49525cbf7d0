"""Checks of Kubernetes manifests against the schemas of their CustomResourceDefinitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator

OPEN = ("x-kubernetes-preserve-unknown-fields", "x-kubernetes-embedded-resource")


def schema_of(definition: dict[str, Any], version: str) -> dict[str, Any]:
    """Return the schema of a version, in which unknown fields are errors, as with `kubectl --validate=strict`."""
    (found,) = [each for each in definition["spec"]["versions"] if each["name"] == version]
    return _closed(found["schema"]["openAPIV3Schema"], top=True)


def _closed(schema: Any, top: bool = False) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items() if key != "format"}
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    if isinstance(schema.get("properties"), dict):
        closed["properties"] = {name: _closed(value) for name, value in schema["properties"].items()}
        if "additionalProperties" not in schema and not any(schema.get(name) for name in OPEN):
            closed["additionalProperties"] = False
    if top:
        closed["properties"]["metadata"] = {"type": "object"}
    return closed


def problems(manifest: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    for error in Draft202012Validator(schema).iter_errors(manifest):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
