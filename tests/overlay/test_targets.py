"""The place of a target: own and inherited names, descriptors that are not run, copies, and files not imported."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from overlay.errors import TargetError
from overlay.targets import ABSENT, defined_elsewhere, find, forget_folders, source_file


class Base:
    @property
    def loud(self):
        raise AssertionError("a descriptor was run")

    @staticmethod
    def inherited():
        return "base"


class Derived(Base):
    own = 1


@pytest.fixture
def module():
    made = ModuleType("a_module")
    made.Derived, made.value, made.instance = Derived, 3, SimpleNamespace(inner=SimpleNamespace(deep=5))
    made.slotted = sys.flags
    return made


@pytest.mark.parametrize(
    ("name", "raw", "owned", "exists"),
    [
        ("value", 3, True, True),
        ("nothing", ABSENT, False, False),
        ("Derived.own", 1, True, True),
        ("Derived.inherited", vars(Base)["inherited"], False, True),
        ("Derived.loud", vars(Base)["loud"], False, True),
        ("Derived.nothing", ABSENT, False, False),
        ("instance.inner.deep", 5, True, True),
        ("instance.nothing", ABSENT, False, False),
        ("slotted.optimize", sys.flags.optimize, False, True),
    ],
)
def test_a_target_is_found_with_its_holder(module, name, raw, owned, exists):
    place = find(module, name)
    assert (place.name, place.raw, place.owned, place.exists) == (name.rpartition(".")[2], raw, owned, exists)
    assert place.holder is (module if "." not in name else eval(f"module.{name.rpartition('.')[0]}"))


@pytest.mark.parametrize(("name", "missing"), [("Gone.f", "Gone"), ("Derived.Inner.f.g", "Derived.Inner")])
def test_a_holder_that_is_missing_is_named(module, name, missing):
    with pytest.raises(TargetError, match=f"^a_module has no {missing}$"):
        find(module, name)


def test_a_copy_is_told_with_its_home(module, monkeypatch):
    """A copy is recognised only as the same object: an object put in its place since is not a copy."""
    home = ModuleType("its_home")
    monkeypatch.setitem(sys.modules, "its_home", home)

    def function():
        pass

    function.__module__, function.__qualname__ = "its_home", "function"
    assert defined_elsewhere(module, "function", function) == ""
    home.function = function
    assert defined_elsewhere(module, "function", function) == "its_home:function"
    assert defined_elsewhere(home, "function", function) == ""
    home.function = print
    assert defined_elsewhere(module, "function", function) == ""
    for qualified in ("maker.<locals>.function", "Gone.function", 3):
        odd = SimpleNamespace(__module__="its_home", __qualname__=qualified)
        assert defined_elsewhere(module, "function", odd) == ""
    assert defined_elsewhere(module, "value", 3) == ""
    assert defined_elsewhere(module, "f", SimpleNamespace(__module__="not.loaded", __qualname__="f")) == ""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A package `spelt` with a module, a package and a namespace below it, none of which can be imported."""
    for file in ("spelt/__init__.py", "spelt/leaf.py", "spelt/inner/__init__.py", "spelt/inner/deep.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("raise AssertionError('it was imported')\n")
    (tmp_path / "spelt" / "space").mkdir()
    (tmp_path / "spelt" / "space" / "far.py").write_text("raise AssertionError('it was imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_folders()
    yield tmp_path
    forget_folders()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("spelt", "spelt/__init__.py"),
        ("spelt.leaf", "spelt/leaf.py"),
        ("spelt.inner", "spelt/inner/__init__.py"),
        ("spelt.inner.deep", "spelt/inner/deep.py"),
        ("spelt.space.far", "spelt/space/far.py"),
        ("spelt.space", None),
        ("spelt.gone", None),
        ("spelt.gone.deeper", None),
        ("sys", None),
    ],
)
def test_a_file_is_found_without_an_import(packages, name, file):
    found = source_file(name)
    assert found == (packages / file if file else None) or (name == "sys" and str(found) == "built-in")
    assert "spelt" not in sys.modules


@pytest.mark.parametrize("name", ["no_such_package", "no_such_package.module"])
def test_a_package_that_is_not_installed_is_an_error(name):
    with pytest.raises(ModuleNotFoundError, match="no package named no_such_package") as raised:
        source_file(name)
    assert raised.value.name == "no_such_package"


def test_folders_are_looked_for_anew_where_that_is_asked(packages):
    assert source_file("spelt.later.leaf") is None
    (packages / "spelt" / "later").mkdir()
    for name in ("__init__", "leaf"):
        (packages / "spelt" / "later" / f"{name}.py").touch()
    assert source_file("spelt.later.leaf") is None, "what was found is kept"
    forget_folders()
    assert source_file("spelt.later.leaf") == packages / "spelt" / "later" / "leaf.py"
