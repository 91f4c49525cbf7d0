"""Find what a qualified name is bound to in a module's syntax tree, without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BRANCHES = ("body", "orelse", "finalbody", "handlers")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Definition:
    """The statements that define a name.

    `implied` means that they are those of its class, whose body does not name it: the member is inherited or generated
    (the `__init__` of a dataclass).
    """

    nodes: tuple[ast.stmt, ...]
    implied: bool = False


def find_definition(tree: ast.Module, qualified_name: str) -> Definition | None:
    """Return the definition of a name in any branch of the module or class; None if there is none."""
    bodies: list[Sequence[ast.stmt]] = [tree.body]
    *path, name = qualified_name.split(".")
    classes: list[ast.ClassDef] = []
    for part in path:
        found = [node for body in bodies for node in _bindings(body, part)]
        classes = [node for node in found if isinstance(node, ast.ClassDef)]
        if not classes:
            return None
        bodies = [each.body for each in classes]
    nodes = tuple(node for body in bodies for node in _bindings(body, name))
    if nodes:
        return Definition(nodes)
    may_have_it = [each for each in classes if each.bases or each.decorator_list]
    return Definition(tuple(classes), implied=True) if may_have_it else None


def all_definitions(tree: ast.Module) -> Iterator[tuple[str, tuple[ast.stmt, ...]]]:
    """Yield every function and class at module or class level with its qualified name."""
    yield from _all(tree.body, "")


def module_level_imports(tree: ast.Module) -> Iterator[ast.ImportFrom]:
    """Return the `from ... import ...` statements that run when the module is imported."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom):
            yield node
        elif not isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def imported_module(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Return the absolute name of the module that an import statement of `module` reads from."""
    if not node.level:
        return node.module or ""
    parents = module.split(".")
    kept = parents[: len(parents) - node.level + is_package]
    return ".".join([*kept, *filter(None, [node.module])])


def _all(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, tuple[ast.stmt, ...]]]:
    for node in _statements(body):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield prefix + node.name, (node,)
        if isinstance(node, ast.ClassDef):
            yield from _all(node.body, f"{prefix}{node.name}.")


def _bindings(body: Sequence[ast.stmt], name: str) -> Iterator[ast.stmt]:
    for node in _statements(body):
        if name in _bound_names(node):
            yield _only(node, name) if isinstance(node, ast.ImportFrom) else node


def _only(node: ast.ImportFrom, name: str) -> ast.ImportFrom:
    """Return the import of one name alone, so that the statement's other names do not count."""
    names = [alias for alias in node.names if (alias.asname or alias.name) == name]
    return ast.ImportFrom(module=node.module, names=names, level=node.level)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield all statements of a body and of the branches in it, but not of functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            for branch in _BRANCHES:
                yield from _statements(getattr(node, branch, []))


def _bound_names(node: ast.stmt) -> set[str]:
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign):
        return {each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()
