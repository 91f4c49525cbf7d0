"""Random mutants from Cosmic Ray's mutation operators, over all Python files of the product."""

from __future__ import annotations

import ast
import random
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator

from tests.mutations.fault import ROOT, Fault, FaultError
from tests.mutations.selection import AREAS, tiers

# Operators that need arguments, and operators that rarely change behaviour: small integers, strings and None are
# singletons, so `==` and `is` agree on them.
_NEEDS_ARGUMENTS = {"core/VariableReplacer", "core/VariableInserter"}
_EQUIVALENT = {
    f"core/ReplaceComparisonOperator_{pair}" for pair in ("Eq_Is", "Is_Eq", "NotEq_IsNot", "IsNot_NotEq")
}  # fmt: skip
# Arguments that make no difference to a program without other faults; see `_without_words`.
_DECIDES_NOTHING = {"print": "flush", "zip": "strict"}


def draw(count: int, seed: int, root: Path = ROOT) -> list[Fault]:
    """Draw ``count`` different faults; the same seed on the same tree gives the same ones.

    First a file is drawn, weighted by its lines of code, then a position in it, then one of the mutations there.

    Raises:
        FaultError: the files do not have that many faults.
    """
    generator, files = random.Random(seed), _files(root)
    weights = [_lines_of_code(root / file) for file in files]
    faults: dict[tuple[str, str], Fault] = {}
    for _ in range(20 * count):
        if len(faults) == count:
            return list(faults.values())
        fault = _draw_one(generator, root, generator.choices(files, weights)[0])
        if fault is not None:
            faults.setdefault((fault.file, fault.source), fault)
    raise FaultError(
        f"--sample {count} is more than the {len(faults)} faults found in {20 * count} draws: ask for less."
    )


def _files(root: Path) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", *AREAS], cwd=root, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return sorted(file for file in listed if file.endswith(".py") and (root / file).is_file())


def _lines_of_code(path: Path) -> int:
    return len(ast.unparse(_without_words(path.read_text(encoding="utf-8"))).splitlines())


def _draw_one(generator: random.Random, root: Path, file: str) -> Fault | None:
    """Draw one fault from a file, or None if the drawn mutation does not change its behaviour."""
    source = (root / file).read_text(encoding="utf-8")
    positions = _positions(source)
    if not positions:
        return None
    position = generator.choice(sorted(positions))
    name, occurrence = generator.choice(sorted(positions[position]))
    try:
        mutated = mutate_code(source, plugins.get_operator(name)(), occurrence)
    except AttributeError:  # Cosmic Ray cannot replace an exception with a qualified name
        return None
    if mutated is None or not _changes_something(source, mutated):
        return None
    label = f"{file}:{position[0]} {name.removeprefix('core/')}"
    return Fault(label, file, mutated, tiers(file, root))


def _operators() -> Iterator[tuple[str, Operator]]:
    for name in plugins.operator_names():
        if name not in _NEEDS_ARGUMENTS | _EQUIVALENT:
            yield name, plugins.get_operator(name)()


def _positions(source: str) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """Return the mutations at each position (line, column): operator names, each with its occurrence in the file."""
    nodes = list(ast_nodes(get_ast(source)))
    positions: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for name, operator in _operators():
        begins = [begin for node in nodes for begin, _ in operator.mutation_positions(node)]
        for occurrence, begin in enumerate(begins):
            positions.setdefault(begin, []).append((name, occurrence))
    return positions


def _changes_something(source: str, mutated: str) -> bool:
    """Return whether two sources differ beyond what `_without_words` removes, and the second one compiles."""
    try:
        return ast.dump(_without_words(source)) != ast.dump(_without_words(mutated))
    except SyntaxError:
        return False


def _whether_program_and_module(condition: str) -> tuple[bool, bool]:
    """Return whether a condition on `__name__` alone holds in a program and in a module (with a lower-case name)."""
    in_program, in_module = (bool(eval(condition, {"__name__": name})) for name in ("__main__", "package.module"))
    return in_program, in_module


def _in_single_precision(value: float) -> float:
    try:
        (nearest,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:  # it is larger than any
        return value
    return nearest


def _is_static(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == "staticmethod"


def _may_forget(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("lru_cache")


def _without_words(source: str) -> ast.Module:
    """Return the syntax tree without annotations, their imports, and docstrings, none of which matters at run time.

    A condition on ``__name__`` becomes its value in a program and in a module.

    A dataclass field keeps its line: its annotation becomes None, and its default stays.

    Several other differences do not matter either. Flushing (`flush` of `print`) changes no output. Bad input is
    rejected with its own message, so an `assert`, or `strict` of `zip`, fails only if there is another fault. Floats
    are rounded to single precision, which is finer than anything measured or printed: 1e9 and 1e9 + 1 are equal.
    Methods of an autograd function are static with or without the decorator, because PyTorch takes them from the class.
    The methods of a protocol are only declarations. A bounded cache may evict an entry at any call, so its bound
    affects only speed.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
            node.decorator_list = [each for each in node.decorator_list if not _may_forget(each)]
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.test = ast.Constant(None)
        elif isinstance(node, ast.If) and {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)} == {
            "__name__"
        }:
            node.test = ast.Constant(_whether_program_and_module(ast.unparse(node.test)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            node.value = _in_single_precision(node.value)
        elif isinstance(node, ast.Assert):
            node.test, node.msg = ast.Constant(None), None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _DECIDES_NOTHING:
            for keyword in node.keywords:
                if keyword.arg == _DECIDES_NOTHING[node.func.id] and isinstance(keyword.value, ast.Constant):
                    keyword.value = ast.Constant(None)
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Function") for base in node.bases):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    method.decorator_list = [each for each in method.decorator_list if not _is_static(each)]
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    method.decorator_list = []
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            if isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str):
                body[0].value.value = ""
    return tree
