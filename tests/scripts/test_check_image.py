"""The image's self-check: its imports, and each reason for which it fails, with stand-in modules."""

import sys
from types import SimpleNamespace

import pytest

from tests.scripts.cluster_files import load_script

program = load_script("scripts/internal/check_image.py")


@pytest.fixture
def image(monkeypatch):
    """Make imports succeed. Return what was imported, the report and the platform."""
    import overlay

    report = SimpleNamespace(applied=["a", "b"], pending=["c"], effective={"a": True, "b": True})
    platform, imported = SimpleNamespace(device_type="npu"), []
    monkeypatch.setattr(program.importlib, "import_module", imported.append)
    monkeypatch.setattr(overlay, "report", lambda: report)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    return imported, report, platform


def test_an_image_in_which_all_patches_work_passes(image, capsys):
    assert program.main() == 0 and tuple(image[0]) == program.MODULES
    printed = capsys.readouterr()
    assert printed.err == "" and printed.out.splitlines()[-1] == (
        "2 patches applied, 1 wait for modules that are not imported yet"
    )
    assert printed.out.startswith("imported verl_patches.prelude_patch\n")


@pytest.mark.parametrize(
    ("part", "changes", "says"),
    [
        (1, {"effective": {"a": True, "b": False}}, "error: the patch b has no effect"),
        (1, {"applied": [], "effective": {}}, "error: no patch was applied"),
        (2, {"device_type": "cpu"}, "error: vLLM detected this machine as SimpleNamespace"),
    ],
)
def test_each_thing_that_is_wrong_fails_it(image, part, changes, says, capsys):
    for name, value in changes.items():
        setattr(image[part], name, value)
    assert program.main() == 1
    assert capsys.readouterr().err.splitlines() == [says]
