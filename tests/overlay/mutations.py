"""Changes to upstream's source that the check must tell apart, made to one target in a copy of its module."""

import ast
from collections.abc import Callable

from overlay.definitions import find_definition

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def reformat(tree: ast.Module, name: str) -> bool:
    """Write the module again, without its comments and in another layout."""
    return True


def add_docstring(tree: ast.Module, name: str) -> bool:
    """Give the target another docstring."""
    for node in _defined(tree, name):
        if ast.get_docstring(node) is not None:
            del node.body[0]
        node.body.insert(0, ast.Expr(ast.Constant("Said in other words.")))
    return bool(_defined(tree, name))


def change_body(tree: ast.Module, name: str) -> bool:
    """Let the target do one thing more."""
    extra = ast.parse("changed_by_upstream = True").body[0]
    for node in _definition(tree, name):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            node.body.append(extra)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            node.value = ast.Tuple([node.value], ast.Load())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            node.module = f"{node.module}.elsewhere"
    return True


def change_signature(tree: ast.Module, name: str) -> bool:
    """Give the target one parameter more."""
    functions = [node for node in _definition(tree, name) if isinstance(node, FUNCTIONS)]
    for node in functions:
        node.args.kwonlyargs.append(ast.arg("added_by_upstream"))
        node.args.kw_defaults.append(ast.Constant(None))
    return bool(functions)


def rename(tree: ast.Module, name: str) -> bool:
    """Give the target (or the class that implies it) another name."""
    definitions = _defined(tree, name)
    for node in definitions:
        node.name += "_renamed_by_upstream"
    return bool(definitions)


EXPECTED: dict[Callable[[ast.Module, str], bool], set[str]] = {
    reformat: {"OK"},
    add_docstring: {"OK"},
    change_body: {"DRIFT"},
    change_signature: {"SIGNATURE"},
    rename: {"MOVED", "MISSING"},
}


def mutated(content: bytes, name: str, mutation: Callable[[ast.Module, str], bool]) -> bytes | None:
    """Return the part of a module that defines a name, after a mutation; None if the mutation does not apply to it."""
    tree = ast.parse(content)
    root = name.partition(".")[0]
    tree.body = [each for each in tree.body if find_definition(ast.Module([each], []), root) is not None]
    return ast.unparse(ast.fix_missing_locations(tree)).encode() if mutation(tree, name) else None


def _definition(tree: ast.Module, name: str) -> tuple[ast.stmt, ...]:
    return find_definition(tree, name).nodes


def _defined(tree: ast.Module, name: str) -> list[ast.stmt]:
    return [node for node in _definition(tree, name) if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
