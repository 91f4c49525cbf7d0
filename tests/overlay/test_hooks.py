import importlib
import importlib.resources
import inspect
import sys

import pytest

from overlay import TargetError
from overlay.hooks import HookFinder, import_under_way, when_import_ends


@pytest.fixture
def hooked(bench):
    """Install a finder for some modules that records its calls."""
    events = []
    finders = []

    def start(*modules):
        finder = HookFinder(
            modules,
            lambda name: events.append(("before", name)),
            lambda module: events.append(("after", module.__name__, sorted(k for k in vars(module) if k[0] != "_"))),
        )
        finder.install()
        finders.append(finder)
        return events

    yield start
    for finder in finders:
        finder.remove()


def test_calls_come_around_execution_and_again_on_reload(bench, hooked):
    bench.write({"acme/core.py": "x = 1", "acme/user.py": "y = 1"})
    events = hooked("acme.core")
    core = importlib.import_module("acme.core")
    importlib.import_module("acme.user")
    assert events == [("before", "acme.core"), ("after", "acme.core", ["x"])]
    importlib.reload(core)
    assert len(events) == 4


def test_a_hooked_module_is_no_different_from_any_other(bench, hooked):
    bench.write({"acme/core.py": "def f(): return 'source'\n", "acme/data.txt": "data"})
    hooked("acme", "acme.core")
    core = importlib.import_module("acme.core")
    assert type(core.__loader__).__name__ == "SourceFileLoader" and core.__spec__.loader is core.__loader__
    assert inspect.getsource(core.f) == "def f(): return 'source'\n"
    assert importlib.resources.files("acme").joinpath("data.txt").read_text() == "data"
    assert importlib.util.find_spec("acme.core").origin == core.__file__
    assert importlib.util.find_spec("acme.absent") is None


def test_the_spec_of_a_hooked_module_can_be_asked_for_without_importing_it(bench, hooked):
    bench.write({"acme/core.py": "x = 1"})
    events = hooked("acme.core")
    spec = importlib.util.find_spec("acme.core")
    assert spec.loader.get_source("acme.core") == "x = 1" and not events and "acme.core" not in sys.modules


def test_an_error_in_a_hook_fails_the_import_and_leaves_nothing(bench):
    bench.write({"acme/core.py": "x = 1"})

    def fail(module):
        raise TargetError("no")

    finder = HookFinder(["acme.core"], lambda name: None, fail)
    finder.install()
    try:
        for _ in range(2):
            with pytest.raises(TargetError):
                importlib.import_module("acme.core")
            assert "acme.core" not in sys.modules
    finally:
        finder.remove()


def test_two_finders_both_run(bench, hooked):
    bench.write({"acme/core.py": "x = 1"})
    hooked("acme.core")
    events = hooked("acme.core")
    importlib.import_module("acme.core")
    assert [event[0] for event in events] == ["before", "before", "after", "after"]


def test_a_namespace_package_cannot_be_hooked(bench, hooked):
    (bench.folder / "other").mkdir()
    hooked("other")
    with pytest.raises(TargetError, match="namespace package"):
        importlib.import_module("other")


def test_the_end_of_an_import_under_way_is_noticed(bench, monkeypatch):
    bench.write({"acme/core.py": "import sys\nsys.notice(sys.modules[__name__])\nlate = 1"})
    seen = []

    def notice(module):
        assert import_under_way(module) and not hasattr(module, "late")
        when_import_ends(module, lambda module: seen.append((module.late, import_under_way(module))))

    monkeypatch.setattr(sys, "notice", notice, raising=False)
    core = importlib.import_module("acme.core")
    assert seen == [(1, False)] and type(core.__spec__) is importlib.machinery.ModuleSpec


def test_an_import_under_way_that_fails_is_not_announced(bench, monkeypatch):
    bench.write({"acme/core.py": "import sys\nsys.notice(sys.modules[__name__])\nraise KeyError('upstream')"})
    monkeypatch.setattr(sys, "notice", lambda module: when_import_ends(module, pytest.fail), raising=False)
    with pytest.raises(KeyError, match="upstream"):
        importlib.import_module("acme.core")


def test_what_the_announcement_raises_comes_out_of_the_import(bench, monkeypatch):
    bench.write({"acme/core.py": "import sys\nsys.notice(sys.modules[__name__])"})

    def fail(module):
        raise TargetError("gone")

    monkeypatch.setattr(sys, "notice", lambda module: when_import_ends(module, fail), raising=False)
    with pytest.raises(TargetError, match="gone"):
        importlib.import_module("acme.core")
