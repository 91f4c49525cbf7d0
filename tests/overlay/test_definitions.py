import ast

import pytest

from overlay.definitions import all_definitions, find_definition, imported_module, module_level_imports

SOURCE = """
from other import f, g as h
import deep.module
LIMIT: int = 4
TABLE = {}
TABLE["x"] = 1
if LIMIT:
    def branched(): return 1
else:
    def branched(): return 2
try:
    import torch
except ImportError:
    torch = None
class Class(Base):
    size = 1
    @property
    def value(self): return 1
    @value.setter
    def value(self, new): pass
    class Inner:
        def deep(self): pass
class Plain:
    pass
def outer():
    def hidden(): pass
    from acme.late import x
"""


@pytest.mark.parametrize(
    "name, count",
    [
        ("f", 1),
        ("h", 1),
        ("deep", 1),
        ("LIMIT", 1),
        ("TABLE", 2),
        ("branched", 2),
        ("torch", 2),
        ("Class", 1),
        ("Class.size", 1),
        ("Class.value", 2),
        ("Class.Inner.deep", 1),
    ],
)
def test_every_way_of_binding_a_name_is_found(name, count):
    definition = find_definition(ast.parse(SOURCE), name)
    assert len(definition.nodes) == count and not definition.implied


@pytest.mark.parametrize(
    "name", ["g", "hidden", "gone", "Gone.method", "Plain.method", "Class.Inner.gone", "outer.hidden"]
)
def test_absent_names_are_not_found(name):
    assert find_definition(ast.parse(SOURCE), name) is None


def test_an_inherited_or_generated_member_is_implied_by_its_class():
    definition = find_definition(ast.parse(SOURCE), "Class.inherited")
    assert definition.implied and definition.nodes[0].name == "Class"
    generated = find_definition(ast.parse("@dataclass\nclass Data:\n    x: int"), "Data.__init__")
    assert generated.implied


def test_imports_inside_functions_run_later():
    found = list(module_level_imports(ast.parse(SOURCE)))
    assert [node.module for node in found] == ["other"]


@pytest.mark.parametrize(
    "statement, is_package, expected",
    [
        ("from a.b import c", False, "a.b"),
        ("from . import c", False, "top.sub"),
        ("from .x import c", False, "top.sub.x"),
        ("from ..x import c", False, "top.x"),
        ("from . import c", True, "top.sub.module"),
        ("from ..x import c", True, "top.sub.x"),
    ],
)
def test_relative_imports_are_resolved(statement, is_package, expected):
    assert imported_module(ast.parse(statement).body[0], "top.sub.module", is_package) == expected


@pytest.mark.parametrize(
    "source, names",
    [
        ("a, (b, *c) = 1, (2, 3)", "abc"),
        ("a = b = 1", "ab"),
        ("a += 1", "a"),
        ("a: int", "a"),
        ("import a.b", "a"),
        ("import x.y as b", "b"),
        ("try:\n    pass\nexcept E:\n    a = 1\nelse:\n    b = 1\nfinally:\n    c = 1", "abc"),
        ("for x in y:\n    a = 1\nelse:\n    b = 1", "ab"),
        ("with x:\n    async def a(): pass", "a"),
        ("x.a = 1", ""),
        ("def f():\n    a = 1", ""),
    ],
)
def test_names_are_bound_by_statements_in_any_branch(source, names):
    found = {name for name in "abc" if find_definition(ast.parse(source), name) is not None}
    assert found == set(names)


def test_all_definitions_have_their_qualified_names():
    found = [name for name, _ in all_definitions(ast.parse(SOURCE))]
    assert found == [
        "branched",
        "branched",
        "Class",
        "Class.value",
        "Class.value",
        "Class.Inner",
        "Class.Inner.deep",
        "Plain",
        "outer",
    ]


def test_only_the_requested_name_of_an_import_counts():
    first, second = (
        ast.dump(find_definition(ast.parse(f"from .x import {names}"), "f").nodes[0]) for names in ("f", "g, f, h as i")
    )
    assert first == second and "level=1" in first and "module='x'" in first
