"""Whole processes: discovery, a prelude, its two ways of activation, pickling by Ray's pickler."""

import subprocess
import sys

import pytest

from overlay.discovery import load, package_folders, patch_files
from tests.overlay.conftest import REPOSITORY

PATCH = """
    from overlay import Feature, wrap

    TESTING = Feature("testing", "a test")
    META = dict(feature=TESTING, why="a test", upstream="not forwarded: a test", remove_when="never")

    @wrap("acme.core:Worker.method", **META)
    def method(upstream, self, x):
        return ("ours", upstream(self, x))

    @wrap("acme.core:f", **META)
    def f(upstream, x):
        return ("ours", upstream(x))
"""
ACTIVATE = """
    import overlay
    from overlay.pins import Pins, Upstream
    PINS = Pins((Upstream("acme", ("acme",), "acme_patches", distribution="acme", release="1.0"),))
    overlay.activate(PINS)
"""
FILES = {
    "acme/core.py": "def f(x): return x\nclass Worker:\n    def method(self, x): return f(x)",
    "acme_patches/core.py": PATCH,
    "acme_patches/features/model.py": "raise AssertionError('a module that is no patch file must not be imported')",
    "prelude.py": ACTIVATE,
}


@pytest.fixture
def acme(bench):
    bench.write(FILES)
    (bench.folder / "acme_patches/features/__init__.py").unlink()
    return bench


def test_only_files_that_declare_are_loaded_and_in_the_order_of_paths(acme):
    acme.write({"acme_patches/a/deep.py": "import overlay\n@overlay.wrap('acme.core:f', **{})\ndef f(): ..."})
    (acme.folder / "acme_patches/linked").symlink_to(acme.folder / "acme_patches/a")
    assert [name for name, _ in patch_files(["acme_patches"])] == ["acme_patches.a.deep", "acme_patches.core"]
    assert package_folders("absent_patches") == [] and list(patch_files(["absent_patches"])) == []


def test_the_order_of_patches_does_not_depend_on_what_was_imported_first(acme):
    acme.write({"acme_patches/zed.py": PATCH.replace("acme.core:", "acme.zed:")})
    script = """
        import importlib, sys
        from overlay.discovery import load
        for name in sys.argv[1:]:
            importlib.import_module(name)
        print([patch.target for patch in load(["acme_patches"])])
    """
    assert acme.run(script) == acme.run(script, "acme_patches.zed", "acme_patches.core")
    assert [patch.target for patch in load(["absent_patches"])] == []


def test_an_activated_process_pickles_patched_objects_by_name(acme):
    out = acme.run(
        """
        import pickle, sys
        import prelude, prelude as again
        import overlay
        overlay.activate(prelude.PINS)
        from acme.core import Worker, f
        try:
            from ray import cloudpickle
        except ImportError:
            cloudpickle = pickle
        assert "acme_patches.features.model" not in sys.modules
        assert Worker().method(1) == ("ours", ("ours", 1))
        data = [cloudpickle.dumps(thing) for thing in (f, Worker, Worker.method, Worker())]
        assert [pickle.loads(item) for item in data][:3] == [f, Worker, Worker.method]
        assert all(b"ours" not in item and b"acme_patches" not in item for item in data)
        print(data[0].hex())
        print(sorted(overlay.assert_effective().applied))
        """
    ).splitlines()
    assert out[1] == "['acme.core:Worker.method', 'acme.core:f']"
    # A worker that unpickles it has imported the prelude first, as the setup hook does.
    read = "import prelude, pickle; print(pickle.loads(bytes.fromhex(sys.argv[1]))(3))"
    assert acme.run(read, out[0]).strip() == "('ours', 3)"


def test_the_prelude_line_inside_the_target_module_itself(acme):
    acme.write(
        {
            "acme/core.py": "import acme.user\nimport prelude\n" + FILES["acme/core.py"].replace("\n", "\n\n"),
            "acme/user.py": "",
        }
    )
    script = """
        import acme.core, overlay
        assert acme.core.Worker().method(1) == ("ours", ("ours", 1)), acme.core.f
        print(len(overlay.assert_effective().applied))
    """
    assert acme.run(script).strip() == "2"


def test_a_missing_target_in_the_module_of_the_prelude_line_fails_its_import(acme):
    acme.write({"acme/core.py": "import prelude\n"})
    script = """
        import overlay
        try:
            import acme.core
        except overlay.TargetError as error:
            print(error)
    """
    assert "acme.core has no Worker" in acme.run(script)


def test_a_conflict_is_found_before_anything_is_changed(acme):
    acme.write({"acme_patches/zed.py": PATCH})
    script = """
        import acme.core, overlay
        try:
            import prelude
        except overlay.ConflictError:
            print(acme.core.f(1))
    """
    assert acme.run(script).strip() == "1"


def test_spawned_processes_are_patched_through_their_main_module(acme):
    (acme.folder / "program.py").write_text(
        "import multiprocessing, prelude\n"
        "def work(x):\n    from acme.core import f\n    return f(x)\n"
        "if __name__ == '__main__':\n"
        "    for method in ('spawn', 'fork'):\n"
        "        with multiprocessing.get_context(method).Pool(1) as pool: print(pool.map(work, [5]))\n"
    )
    environment = {"PYTHONPATH": f"{acme.folder}:{REPOSITORY}"}
    command = [sys.executable, str(acme.folder / "program.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    assert result.stdout.split("\n")[:2] == ["[('ours', 5)]"] * 2
