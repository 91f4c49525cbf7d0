import importlib.util
import sys
from types import ModuleType

import pytest

from overlay import TargetError

BUILT = []


def build(name):
    BUILT.append(name)
    module = ModuleType(name)
    module.pad, module.unpad = "pad", "unpad"
    return module


@pytest.fixture(autouse=True)
def forget():
    BUILT.clear()


def test_a_provided_module_is_built_on_first_use_and_its_parents_stay_absent(bench):
    bench.write({"acme/core.py": "def late():\n    from absent.module import pad, unpad\n    return pad, unpad"})
    engine = bench.activate(bench.patch("provide", "absent.module", build))
    assert not BUILT and not hasattr(sys.modules["absent.module"], "__path__") and not BUILT
    assert importlib.import_module("acme.core").late() == ("pad", "unpad") and BUILT == ["absent.module"]
    assert importlib.util.find_spec("absent") is None
    with pytest.raises(ImportError):
        exec("from absent.module import gone")
    report = bench.examine(engine)
    assert report.effective == {"absent.module": True} and BUILT == ["absent.module"]
    sys.modules["absent.module"] = ModuleType("absent.module")
    assert bench.examine(engine).effective == {"absent.module": False}


def test_the_real_module_wins_where_it_exists(bench):
    bench.write({"acme/core.py": "real = True"})
    engine = bench.activate(bench.patch("provide", "acme.core", build))
    assert importlib.import_module("acme.core").real and not BUILT
    report = bench.examine(engine)
    assert report.unneeded == ["acme.core"] and not report.applied and not report.problems


def test_a_failed_build_fails_again_instead_of_leaving_an_empty_module(bench):
    def fail(name):
        raise ImportError("not here")

    bench.activate(bench.patch("provide", "absent.module", fail))
    for _ in range(2):
        with pytest.raises(ImportError, match="not here"):
            exec("from absent.module import pad")


def test_code_runs_before_a_module_and_once_only(bench):
    bench.write({"acme/core.py": "import sys\nseen = sys.modules['other'].value", "other/__init__.py": "value = 0"})

    def prepare():
        importlib.import_module("other").value += 1

    engine = bench.activate(bench.patch("before_import", "acme.core", prepare))
    core = importlib.import_module("acme.core")
    importlib.reload(core)
    assert core.seen == 1 and bench.examine(engine).effective == {"acme.core": True}


def test_it_is_an_error_when_the_module_is_imported_already(bench):
    bench.write({"acme/core.py": ""})
    importlib.import_module("acme.core")
    with pytest.raises(TargetError, match="already imported. Activate the overlay earlier"):
        bench.activate(bench.patch("before_import", "acme.core", lambda: None))
