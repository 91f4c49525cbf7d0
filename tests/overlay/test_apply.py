"""The effects of applying patches on upstream, in this process, on throw-away packages."""

import asyncio
import importlib
import sys
from types import SimpleNamespace

import pytest

import overlay
from overlay import EffectiveError, Feature, TargetError
from overlay.effective import require

CORE = """
    def f(x):
        return ("f", x)

    def g():
        return f(0)

    class Base:
        def inherited(self):
            return "base"

    class Class(Base):
        limit = 3

        def method(self, x):
            return ("method", x)

        @staticmethod
        def static(x):
            return ("static", x)

        class Inner:
            def deep(self):
                return "deep"

    async def later(x):
        return x

    LIMIT = 4
    REGISTRY = {"one": 1}
"""


def ours(upstream, *args, **kwargs):
    return ("ours", upstream(*args, **kwargs))


@pytest.fixture
def acme(bench):
    bench.write({"acme/core.py": CORE, "acme/user.py": "from acme.core import f\ndef use(): return f(1)"})
    return bench


@pytest.mark.parametrize("when", ["before", "after"])
def test_every_kind_is_applied_whether_the_target_is_imported_before_or_after(acme, when):
    if when == "before":
        importlib.import_module("acme.user")
    engine = acme.activate(
        acme.patch("wrap", "acme.core:f", ours),
        acme.patch("wrap", "acme.core:Class.method", ours),
        acme.patch("wrap", "acme.core:Class.static", ours),
        acme.patch("wrap", "acme.core:Class.Inner.deep", ours),
        acme.patch("wrap", "acme.core:Class.inherited", ours),
        acme.patch("wrap", "acme.core:LIMIT", lambda value: value + 1),
        acme.patch("replace", "acme.core:Class.limit", lambda: 30),
        acme.patch("add", "acme.core:extra", lambda module: module.LIMIT),
        acme.patch("register", "acme.core:REGISTRY", lambda module: {"two": module.f}),
    )
    importlib.import_module("acme.user")
    core = sys.modules["acme.core"]

    assert core.f(2) == ("ours", ("f", 2)) and core.g() == ("ours", ("f", 0))
    assert acme_user().use() == ("ours", ("f", 1))
    assert core.Class().method(1) == ("ours", ("method", 1)) and core.Class.static(1) == ("ours", ("static", 1))
    assert core.Class.Inner().deep() == ("ours", "deep")
    assert core.Class().inherited() == ("ours", "base") and core.Base().inherited() == "base"
    assert core.LIMIT == 5 and core.extra == 5 and core.Class.limit == 30
    assert core.REGISTRY["two"] is core.f and core.REGISTRY["one"] == 1
    report = acme.examine(engine)
    assert len(report.applied) == 9 and not report.pending and all(report.effective.values()) and not report.problems
    assert report.rebound == (["acme.user:f"] if when == "before" else [])


def acme_user():
    return sys.modules["acme.user"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_copies_in_the_targets_own_module_are_rebound(acme, when):
    """An example is a table of functions by name that the module builds from its own."""
    own = "def f(x):\n    return ('f', x)\n\nalias = f\nTABLE = {'f': f}\nKEPT = [f, len]\n"
    acme.write({"acme/table.py": own})
    if when == "before":
        importlib.import_module("acme.table")
    engine = acme.activate(acme.patch("wrap", "acme.table:f", ours))
    table = importlib.import_module("acme.table")
    assert [each(1) for each in (table.alias, table.TABLE["f"], table.KEPT[0])] == [("ours", ("f", 1))] * 3
    report = acme.examine(engine)
    assert report.rebound == ["acme.table:alias", "acme.table:TABLE['f']", "acme.table:KEPT[0]"] and not report.problems


def test_a_second_engine_call_or_import_changes_nothing(acme):
    acme.activate(acme.patch("wrap", "acme.core:f", ours))
    core = importlib.import_module("acme.core")
    assert importlib.import_module("acme.core").f(1) == ("ours", ("f", 1)) and core.f(1) == ("ours", ("f", 1))


@pytest.fixture
def switched(monkeypatch):
    """A feature, and this process's settings that turn it on or off; there are none at first."""
    monkeypatch.setattr(overlay.feature, "_settings_of_process", None)
    settings = SimpleNamespace(on=True)
    return Feature("switched", "a test", switch="on", is_on=lambda settings: settings.on), settings


def test_a_patch_is_called_only_while_its_feature_is_on(acme, switched):
    feature, settings = switched
    engine = acme.activate(*(acme.patch("wrap", f"acme.core:{name}", ours, feature=feature) for name in ("f", "later")))
    core = importlib.import_module("acme.core")
    assert core.f(1) == ("f", 1) and asyncio.run(core.later(1)) == 1 and not engine.called
    overlay.read_settings_from(lambda: settings)
    assert core.f(1) == ("ours", ("f", 1)) and engine.called == {"acme.core:f@switched"}
    settings.on = False
    assert core.f(1) == ("f", 1) and asyncio.run(core.later(1)) == 1
    assert engine.called == {"acme.core:f@switched"}


def test_a_value_cannot_be_switched(acme, switched):
    acme.activate(acme.patch("wrap", "acme.core:LIMIT", lambda value: 5, feature=switched[0]))
    with pytest.raises(TargetError, match="a value cannot be patched by a feature that can be off"):
        importlib.import_module("acme.core")


def test_wraps_nest_in_the_declared_order_around_a_replacement(acme):
    def naming(name):
        return lambda upstream, *args: (name, upstream(*args))

    acme.activate(
        acme.patch("wrap", "acme.core:f", naming("outer"), feature="outer", after=["acme.core:f@inner"]),
        acme.patch("wrap", "acme.core:f", naming("inner"), feature="inner"),
        acme.patch("replace", "acme.core:f", renewed, feature="new"),
    )
    assert importlib.import_module("acme.core").f(1) == ("outer", ("inner", ("new", 1)))


def renewed(x):
    return ("new", x)


@pytest.mark.parametrize("first", ["acme.core", "other"])
def test_a_patch_waits_for_what_it_must_follow_in_another_module(acme, first):
    acme.write({"other/__init__.py": "def h(): return 'h'"})
    engine = acme.activate(
        acme.patch("wrap", "acme.core:f", lambda up, x: ("late", up(x)), feature="late", after=["other:h"]),
        acme.patch("wrap", "acme.core:f", lambda up, x: ("last", up(x)), feature="x", after=["acme.core:f@late"]),
        acme.patch("wrap", "other:h", ours),
    )
    importlib.import_module(first)
    report = acme.examine(engine)
    assert bool(report.problems) == (first == "acme.core")
    if report.problems:
        with pytest.raises(EffectiveError, match="waits for other:h@testing"):
            require(report)
    importlib.import_module("other"), importlib.import_module("acme.core")
    assert sys.modules["acme.core"].f(1) == ("last", ("late", ("f", 1)))
    assert not acme.examine(engine).problems


@pytest.mark.parametrize("target", ["acme.core:gone", "acme.core:Class.gone", "acme.core:Gone.method"])
@pytest.mark.parametrize("imported", [True, False])
def test_a_missing_target_is_fatal_and_says_which_patch_and_which_versions(acme, target, imported):
    patch = acme.patch("wrap", target, ours)
    if imported:
        importlib.import_module("acme.core")
        with pytest.raises(TargetError) as caught:
            acme.activate(patch)
    else:
        engine = acme.activate(patch)
        with pytest.raises(TargetError) as caught:
            importlib.import_module("acme.core")
        assert "acme.core" not in sys.modules and acme.examine(engine).problems
    message = str(caught.value)
    assert target in message and "feature testing" in message and "test_apply" in message
    assert "release acme 1.0" in message and "12345678" in message and "Installed: acme" in message


def test_a_missing_target_stays_a_problem_when_upstream_swallows_the_error(acme):
    acme.write({"acme/careless.py": "try:\n    import acme.core\nexcept Exception:\n    pass"})
    engine = acme.activate(acme.patch("wrap", "acme.core:gone", ours))
    importlib.import_module("acme.careless")
    with pytest.raises(EffectiveError, match="upstream has nothing with this name"):
        require(acme.examine(engine))


def test_a_missing_module_is_fatal_at_once_and_a_missing_package_is_reported(acme):
    with pytest.raises(TargetError, match="no module acme.gone"):
        acme.activate(acme.patch("wrap", "acme.gone:f", ours))
    engine = acme.activate(acme.patch("wrap", "absent:f", ours))
    report = acme.examine(engine)
    assert report.absent == ["absent:f"] and report.pending == ["absent:f"] and not report.problems


def test_a_patch_does_not_wait_for_one_whose_upstream_is_not_installed(acme):
    engine = acme.activate(
        acme.patch("wrap", "absent:f", ours), acme.patch("wrap", "acme.core:f", ours, after=["absent:f"])
    )
    assert importlib.import_module("acme.core").f(1) == ("ours", ("f", 1))
    assert acme.examine(engine).effective == {"acme.core:f": True}


def test_names_that_exist_are_not_added_and_entries_not_overwritten(acme):
    importlib.import_module("acme.core")
    for name in ("f", "Class.limit", "Class.inherited"):
        with pytest.raises(TargetError, match="upstream already has this name"):
            acme.activate(acme.patch("add", f"acme.core:{name}", lambda module: 0))
    with pytest.raises(TargetError, match="already has these entries: 'one'"):
        acme.activate(acme.patch("register", "acme.core:REGISTRY", lambda module: {"one": 2, "two": 2}))
    assert importlib.import_module("acme.core").REGISTRY == {"one": 1}
    with pytest.raises(TargetError, match="no mapping here"):
        acme.activate(acme.patch("register", "acme.core:f", lambda module: {"two": 2}))


def test_an_imported_copy_is_no_target_unless_only_it_is_meant(acme):
    importlib.import_module("acme.user")
    with pytest.raises(TargetError, match="this is a copy of acme.core:f"):
        acme.activate(acme.patch("wrap", "acme.user:f", ours))
    engine = acme.activate(acme.patch("wrap", "acme.user:f", ours, only_here=True))
    assert acme_user().use() == ("ours", ("f", 1)) and sys.modules["acme.core"].f(1) == ("f", 1)
    assert not acme.examine(engine).problems


def test_a_body_that_raises_names_its_patch_and_is_no_import_error(acme):
    def build(module):
        raise ImportError("something of ours")

    acme.activate(acme.patch("add", "acme.core:extra", build))
    with pytest.raises(TargetError, match="add of acme.core:extra.*its body raised ImportError: something of ours"):
        importlib.import_module("acme.core")


def test_a_reload_is_patched_again(acme):
    engine = acme.activate(
        acme.patch("wrap", "acme.core:Class.method", ours),
        acme.patch("add", "acme.core:extra", lambda module: object()),
        acme.patch("register", "acme.core:REGISTRY", lambda module: {"two": object()}),
    )
    core = importlib.import_module("acme.core")
    old = core.Class
    importlib.reload(core)
    assert core.Class is not old and core.Class().method(1) == ("ours", ("method", 1)) == old().method(1)
    assert not acme.examine(engine).problems and set(core.REGISTRY) == {"one", "two"}


def test_circular_imports_leave_no_copy_of_upstreams_own(bench):
    bench.write(
        {
            "acme/core.py": "def f(): return 'f'\nimport acme.user",
            "acme/user.py": "from acme.core import f as renamed\nTABLE = {'f': renamed}\ndef use(): return renamed()",
        }
    )
    engine = bench.activate(bench.patch("wrap", "acme.core:f", ours))
    importlib.import_module("acme.core")
    assert acme_user().use() == ("ours", "f") == acme_user().TABLE["f"]()
    assert bench.examine(engine).rebound == ["acme.user:renamed", "acme.user:TABLE['f']"]
    assert not bench.examine(engine).problems
