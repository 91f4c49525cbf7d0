"""Fingerprints of source code that depend on what the code does and not on how it is written down.

The syntax tree is walked in a canonical form: docstrings, positions, empty fields and the fields that differ between
Python versions are left out, so a fingerprint is the same on every Python from 3.9 to 3.13. (`ast.dump` is not.) This
file imports nothing of the package, so that it runs by itself on all of them.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_SKIPPED_FIELDS = frozenset({"type_params", "type_comment", "type_ignores", "kind", "ctx"})
_ANNOTATION_FIELDS = frozenset({"annotation", "returns"})
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_DIGEST_LENGTH = 20


@dataclass(frozen=True)
class Fingerprint:
    """Digests of one definition.

    Attributes:
        code: of everything.
        behaviour: of everything but annotations.
        call: of the call signature without annotations.
        signature: the call signature as text.
    """

    code: str
    behaviour: str
    call: str
    signature: str


def fingerprint(nodes: list[ast.stmt]) -> Fingerprint:
    """Compute the fingerprint of a definition; `nodes` are all its statements (branches, overloads, setters).

    The name that is defined does not count, so that a renamed definition is recognised.
    """
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return Fingerprint(
        code=_digest(part for node in nodes for part in _tokens(node, annotations=True, named=False)),
        behaviour=_digest(part for node in nodes for part in _tokens(node, annotations=False, named=False)),
        call=_digest(part for node in functions for part in _tokens(node.args, annotations=False)),
        signature="; ".join(_signature(node.args) for node in functions),
    )


def _digest(parts: Iterator[str]) -> str:
    return hashlib.sha256("\x00".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_LENGTH]


def _tokens(node: ast.AST, annotations: bool, named: bool = True) -> Iterator[str]:
    yield f"({type(node).__name__}"
    for name in sorted(node._fields):
        value: Any = getattr(node, name, None)
        if (
            name in _SKIPPED_FIELDS
            or (name in _ANNOTATION_FIELDS and not annotations)
            or (name == "name" and not named)
        ):
            continue
        if name == "body" and isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            value = value[1:]
        if name == "values" and isinstance(node, ast.JoinedStr):
            value = _merged(value)
        if value is None or value == []:
            if not (isinstance(node, ast.Constant) and name == "value"):
                continue
        yield name
        yield from _value_tokens(value, annotations)
    yield ")"


def _value_tokens(value: object, annotations: bool) -> Iterator[str]:
    if isinstance(value, ast.AST):
        yield from _tokens(value, annotations)
    elif isinstance(value, list):
        for item in value:
            # A gap in a list means something: the key of `**mapping` in a dict, a keyword argument without default.
            yield from _value_tokens(item, annotations)
    else:
        yield f"{type(value).__name__} {ascii(value)}"


def _merged(parts: list[ast.expr]) -> list[ast.expr]:
    """Return the parts of an f-string with neighbouring texts joined; Python versions split them differently."""
    merged: list[ast.expr] = []
    for part in parts:
        text, before = _text(part), _text(merged[-1]) if merged else None
        if text is not None and before is not None:
            merged[-1] = ast.Constant(value=before + text)
        elif text != "":
            merged.append(part)
    return merged


def _text(part: ast.expr) -> str | None:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else None


def _signature(arguments: ast.arguments) -> str:
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    shown = [_shown(each, arguments.defaults, index - first_default) for index, each in enumerate(positional)]
    if arguments.posonlyargs:
        shown.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg is not None:
        shown.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        shown.append("*")
    shown += [_shown(each, arguments.kw_defaults, index) for index, each in enumerate(arguments.kwonlyargs)]
    if arguments.kwarg is not None:
        shown.append(f"**{arguments.kwarg.arg}")
    return f"({', '.join(shown)})"


def _shown(argument: ast.arg, defaults: list, index: int) -> str:
    default = defaults[index] if 0 <= index < len(defaults) else None
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"
