"""`assert_effective` must see every way in which a patch that was applied is not what is called."""

import importlib
import sys

import pytest

from overlay import EffectiveError, assert_effective
from overlay.effective import require
from overlay.engine import Effect, Engine, _is_in_place

CORE = """
    LIMIT = 4
    TABLE = {'one': 1}
    def f(): return 'f'
    class Class:
        def m(self): return 1
"""
USER = """
    from acme.core import f as g, LIMIT
    KEPT = [g]
    class Holder:
        call = staticmethod(g)
"""


@pytest.mark.parametrize(
    ("effect", "in_place"),
    [
        (Effect("overlay.engine", "Engine", Engine, upstream=object()), True),
        (Effect("overlay.engine", "Engine", None, upstream=object()), False),
        (Effect("overlay.engine", "Engine", Engine, upstream=None), False),
        (Effect("overlay.not_imported", "Engine", Engine, upstream=object()), False),
        (Effect("overlay.engine", "Absent", Engine, upstream=object()), False),
    ],
)
def test_change_applies_where_upstreams_object_has_it(effect, in_place):
    assert _is_in_place(effect) is in_place


def ours(upstream, *args):
    return ("ours", upstream(*args))


@pytest.fixture
def acme(bench):
    bench.write(
        {
            "acme/core.py": CORE,
            "acme/user.py": USER,
            "acme/other.py": "LIMIT = 4\nfrom . import core\nfrom .core import LIMIT as renamed",
            "acme/later.py": "def f(): return 'later'",
            "other/__init__.py": "",
        }
    )
    return bench


def problems(bench, engine):
    report = bench.examine(engine)
    if report.problems:
        with pytest.raises(EffectiveError) as caught:
            require(report)
        assert all(problem in str(caught.value) for problem in report.problems)
    return report.problems


def test_copies_in_globals_classes_and_containers_are_rebound_at_once_and_listed(acme):
    user = importlib.import_module("acme.user")
    engine = acme.activate(acme.patch("wrap", "acme.core:f", ours))
    assert user.g() == ("ours", "f") == user.KEPT[0]() == user.Holder.call()
    assert acme.examine(engine).rebound == ["acme.user:g", "acme.user:KEPT[0]", "acme.user:Holder.call"]
    assert not problems(acme, engine)


def test_a_copy_that_appears_later_is_found(acme):
    core, user = importlib.import_module("acme.core"), importlib.import_module("acme.user")
    upstream = core.f
    engine = acme.activate(acme.patch("wrap", "acme.core:f", ours))
    user.Holder.call = staticmethod(upstream)
    assert problems(acme, engine) == ["acme.core:f: copies of upstream's version are still in acme.user:Holder.call"]
    assert acme.examine(engine).effective == {"acme.core:f": False}
    user.Holder.call = staticmethod(core.f)
    assert not problems(acme, engine)


def test_a_target_that_upstream_overwrites_later_is_found(acme):
    engine = acme.activate(
        acme.patch("wrap", "acme.core:Class.m", ours),
        acme.patch("register", "acme.core:TABLE", lambda module: {"two": 2}),
    )
    core = importlib.import_module("acme.core")
    assert not problems(acme, engine)
    core.TABLE["two"] = 3
    assert problems(acme, engine) == ["acme.core:TABLE: the entries 'two' are gone or overwritten"]
    core.Class.m = problems
    core.TABLE.clear()
    first, second = problems(acme, engine)
    assert first.startswith("acme.core:Class.m: overwritten since by ") and first.endswith("test_effective.problems")
    assert second == "acme.core:TABLE: the entries 'two' are gone or overwritten"
    del core.Class
    assert problems(acme, engine)[0] == "acme.core:Class.m: acme.core has no Class"


def test_a_module_that_was_replaced_is_found(acme):
    engine = acme.activate(acme.patch("wrap", "acme.core:f", ours))
    importlib.import_module("acme.core")
    del sys.modules["acme.core"]
    assert problems(acme, engine) == ["acme.core:f: its module was unloaded"]


def test_a_patch_that_waits_although_its_module_is_imported_is_found(acme):
    engine = acme.activate(
        acme.patch("wrap", "acme.later:f", ours), acme.patch("wrap", "acme.core:f", ours, after=["acme.later:f"])
    )
    assert not problems(acme, engine)
    importlib.import_module("acme.core")
    (problem,) = problems(acme, engine)
    assert "wrap of acme.core:f" in problem and problem.endswith("this patch waits for acme.later:f@testing")
    importlib.import_module("acme.later")
    assert not problems(acme, engine)


def test_values_are_shared_so_only_imported_copies_of_them_follow(acme):
    user, other = importlib.import_module("acme.user"), importlib.import_module("acme.other")
    engine = acme.activate(acme.patch("wrap", "acme.core:LIMIT", lambda value: value + 1))
    assert (user.LIMIT, other.core.LIMIT, other.renamed, other.LIMIT) == (5, 5, 5, 4)
    assert acme.examine(engine).rebound == ["acme.user:LIMIT", "acme.other:renamed"] and not problems(acme, engine)


def test_required_patches_must_be_applied(acme):
    engine = acme.activate(acme.patch("wrap", "acme.core:f", ours))
    with pytest.raises(EffectiveError, match="acme.core:f: required here, but not applied"):
        require(acme.examine(engine), ["acme.core:f"])
    importlib.import_module("acme.core")
    assert require(acme.examine(engine), ["acme.core:f"]).applied == ["acme.core:f"]


def test_without_activation_nothing_is_proved(monkeypatch):
    monkeypatch.setattr("overlay._engine", None)
    with pytest.raises(EffectiveError, match="not active in this process"):
        assert_effective()


def test_an_inherited_method_is_patched_for_the_class_alone(acme):
    acme.write(
        {"acme/family.py": "class Base:\n    def m(self): return 0\nclass One(Base): pass\nclass Two(Base): pass"}
    )
    engine = acme.activate(acme.patch("wrap", "acme.family:One.m", ours))
    family = importlib.import_module("acme.family")
    assert (family.One().m(), family.Two().m()) == (("ours", 0), 0) and not problems(acme, engine)


def test_looking_for_copies_fills_no_lazy_mapping(acme):
    acme.write(
        {
            "acme/lazy.py": """
                class Lazy(dict):
                    def items(self): raise AssertionError("filled")
                class Pretender:
                    __class__ = property(lambda self: 1 / 0)
                TABLE, OTHER = Lazy(), Pretender()
            """
        }
    )
    importlib.import_module("acme.lazy")
    engine = acme.activate(acme.patch("wrap", "acme.core:f", ours))
    importlib.import_module("acme.core")
    assert not problems(acme, engine)


def test_a_patch_is_executed_once_its_body_has_been_called(acme):
    engine = acme.activate(
        acme.patch("wrap", "acme.core:f", lambda upstream, *args: upstream(*args)),
        acme.patch("add", "acme.core:added", lambda module: None),
        acme.patch("provide", "absent.module", type(sys)),
    )
    core = importlib.import_module("acme.core")
    assert engine.called == {"acme.core:added@testing"}
    core.f()
    assert engine.called == {"acme.core:added@testing", "acme.core:f@testing"}
    with pytest.raises(ImportError):
        exec("from absent.module import anything")
    assert "absent.module@testing" in engine.called
