"""Changes that another library makes inside `unpatched` end up below the patches, as if they had come first."""

import importlib
import sys

import pytest

import overlay
from overlay import TargetError

CORE = """
    LIMIT = 4
    def f(x): return ('f', x)
    def g(x): return ('g', x)
    class Base:
        def inherited(self): return 'base'
    class Class(Base):
        def method(self): return 'method'
        @classmethod
        def make(cls): return 'make'
        @staticmethod
        def static(): return 'static'
"""
USER = """
    from acme.core import LIMIT, f
    from acme.core import f as renamed
    KEPT = [f]
"""
LATE = "def late(): return 'late'"
TARGETS = ("f", "Class.method", "Class.inherited", "Class.make", "Class.static")


def ours(upstream, *args):
    return ("ours", upstream(*args))


def again(upstream, *args):
    return ("again", upstream(*args))


@pytest.fixture
def acme(bench):
    bench.write(
        {"acme/core.py": CORE, "acme/user.py": USER, "acme/late.py": LATE, "other/library.py": "def h(x): pass"}
    )
    importlib.import_module("acme.user")
    return bench


@pytest.fixture
def core(acme):
    return importlib.import_module("acme.core")


def activate(acme, *more):
    return acme.activate(*[acme.patch("wrap", f"acme.core:{target}", ours) for target in TARGETS], *more)


def behaviour(core):
    value = core.Class()
    return [core.f(1), value.method(), value.inherited(), core.Class.make(), core.Class.static()]


def test_inside_upstream_is_as_it_was_and_afterwards_all_is_patched_again(acme, core):
    before, raw = behaviour(core), dict(vars(core.Class))
    engine = activate(acme, acme.patch("wrap", "acme.core:LIMIT", lambda value: value + 1))
    patched = behaviour(core)
    user = sys.modules["acme.user"]
    with engine.unpatched():
        assert behaviour(core) == before and dict(vars(core.Class)) == raw
        assert user.renamed is user.KEPT[0] is core.f and (core.LIMIT, user.LIMIT) == (4, 4)
    assert behaviour(core) == patched != before
    assert user.renamed is user.KEPT[0] is core.f and (core.LIMIT, user.LIMIT) == (5, 5)
    assert acme.examine(engine).problems == []


def test_what_is_wrapped_or_replaced_inside_is_called_by_the_patch(acme, core):
    engine = activate(acme, acme.patch("wrap", "acme.core:f", again, feature="second"))
    with engine.unpatched():
        wrapped = core.f
        core.f = lambda x: ("theirs", wrapped(x))
        core.Class.method = lambda self: "their method"
    assert core.f(1) == ("again", ("ours", ("theirs", ("f", 1))))
    assert core.Class().method() == ("ours", "their method")
    assert sys.modules["acme.user"].renamed is core.f
    assert acme.examine(engine).problems == []


def test_without_it_the_same_change_is_a_problem(acme, core):
    engine = activate(acme)
    core.Class.method = lambda self: "their method"
    (problem,) = acme.examine(engine).problems
    assert "overwritten since" in problem


def test_a_function_of_the_library_itself_may_take_the_place(acme, core):
    library = importlib.import_module("other.library")
    engine = activate(acme)
    with engine.unpatched():
        core.f = library.h
    assert core.f(1) == ("ours", None) and acme.examine(engine).problems == []


def test_a_subclass_that_takes_the_place_of_a_class_is_patched_and_the_class_is_not(acme, core):
    engine, first = activate(acme), core.Class
    with engine.unpatched():
        core.Class = type("Class", (first,), {"method": lambda self: "their method", "__module__": "acme.core"})
    assert core.Class().method() == ("ours", "their method")
    assert first().method() == "method" and acme.examine(engine).problems == []


def test_modules_imported_inside_are_patched_at_the_end(acme, core):
    engine = activate(acme, acme.patch("wrap", "acme.late:late", ours))
    with engine.unpatched():
        late = importlib.import_module("acme.late")
        assert late.late() == "late"
        late.late = lambda: "their late"
    assert late.late() == ("ours", "their late") and acme.examine(engine).problems == []


def test_a_target_that_was_overwritten_before_stays_a_problem(acme, core):
    engine = activate(acme)
    core.Class.method = lambda self: "somebody's"
    with engine.unpatched():
        assert core.Class().method() == "somebody's"
    assert core.Class().method() == "somebody's"
    assert len(acme.examine(engine).problems) == 1


def test_a_target_that_the_library_takes_away_is_an_error(acme, core):
    engine = activate(acme)
    with pytest.raises(TargetError, match="acme.core:f.*nothing with this name"), engine.unpatched():
        del core.f


def test_patches_are_put_back_when_the_library_fails_and_it_cannot_be_nested(acme, core):
    engine = activate(acme)
    patched = behaviour(core)
    with pytest.raises(ZeroDivisionError), engine.unpatched():
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="already"), engine.unpatched(), engine.unpatched():
        pass
    assert behaviour(core) == patched and acme.examine(engine).problems == []


def test_in_a_process_without_the_overlay_nothing_happens():
    with overlay.unpatched():
        pass
