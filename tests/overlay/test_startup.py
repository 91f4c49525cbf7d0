"""`overlay.startup` in Pythons of their own: a package is imported with the patches, and nothing else is touched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from overlay import startup

PACKAGE, PRELUDE = "acme", "acme_patches.prelude"
# Counts its imports, and asserts that the package was not executed before.
PRELUDE_TEXT = "import sys\nassert 'acme.core' not in sys.modules\nTIMES = globals().get('TIMES', 0) + 1\n"
SEEN = (
    "import json, sys; print(json.dumps([acme.__spec__.loader.__class__.__name__, acme.core.VALUE, "
    "sys.modules['acme_patches.prelude'].TIMES, sum(getattr(f, 'watched', '') == 'acme' for f in sys.meta_path)]))"
)


@pytest.fixture
def python(tmp_path: Path) -> Python:
    return Python(tmp_path)


class Python:
    """An interpreter with a package installed, and a project with patches of it elsewhere."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
        (self.site,) = (folder / "env").glob("lib/python*/site-packages")
        self.executable, self.elsewhere = folder / "env" / "bin" / "python", folder / "elsewhere"
        self.root = folder / "a project's root"
        for file, text in (
            (self.site / "acme" / "__init__.py", "from acme import core\n"),
            (self.site / "acme" / "core.py", "VALUE = 7\n"),
            (self.root / "acme_patches" / "prelude.py", PRELUDE_TEXT),
            (self.elsewhere / "empty", ""),
        ):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def install(self) -> None:
        startup.install(PACKAGE, PRELUDE, self.root, self.site)

    def run(self, program: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [self.executable, *options, "-c", program]
        return subprocess.run(command, cwd=self.elsewhere, capture_output=True, text=True, timeout=120)

    def said(self, program: str) -> list[object]:
        ended = self.run(program)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)


def test_import_of_the_package_activates_before_its_code(python):
    python.install()
    assert python.said(f"import acme; {SEEN}") == ["SourceFileLoader", 7, 1, 0]
    assert python.said(f"import acme.core, acme; {SEEN}") == ["SourceFileLoader", 7, 1, 0]
    # -m imports the package, too, and so does a process that this one starts.
    (python.site / "acme" / "run.py").write_text(f"import acme; {SEEN}")
    (python.site / "start.py").write_text(
        "import subprocess, sys; subprocess.run([sys.executable, '-m', 'acme.run'], check=True)"
    )
    assert python.said("import start") == ["SourceFileLoader", 7, 1, 0]


def test_process_without_the_package_is_not_touched(python):
    python.install()
    modules = "import json, sys; print(json.dumps([name for name in sys.modules if name.startswith('acme')]))"
    assert python.said(modules) == []
    # Neither does looking for the package import anything.
    assert python.said(f"import importlib.util; assert importlib.util.find_spec('acme').loader; {modules}") == []
    plain = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    with_it = set(python.said(plain))
    assert startup.remove(PACKAGE, python.site)
    assert with_it - set(python.said(plain)) == {"patch_overlay_acme", "__future__"}


def test_second_install_changes_nothing(python):
    python.install()
    before = {file.name: file.read_bytes() for file in startup.files_of(PACKAGE, python.site)}
    python.install()
    assert {file.name: file.read_bytes() for file in startup.files_of(PACKAGE, python.site)} == before
    assert startup.installed_root(PACKAGE, python.site) == python.root
    # An activation by another way, such as a line in the package, is the same one.
    (python.site / "acme" / "__init__.py").write_text("import acme_patches.prelude\nfrom acme import core\n")
    assert python.said(f"import acme; {SEEN}") == ["SourceFileLoader", 7, 1, 0]
    again = "import patch_overlay_acme as p; p.watch('acme', 'acme_patches.prelude', '/'); import acme;"
    assert python.said(f"{again} {SEEN}") == ["SourceFileLoader", 7, 1, 0]


def test_removed_install_leaves_the_package_alone(python):
    assert not startup.remove(PACKAGE, python.site) and startup.installed_root(PACKAGE, python.site) is None
    before = sorted(python.site.iterdir())
    python.install()
    assert startup.remove(PACKAGE, python.site) and sorted(python.site.iterdir()) == before
    assert python.said("import acme, json, sys; print(json.dumps('acme_patches.prelude' in sys.modules))") is False


def test_missing_patches_fail_the_import_by_name(python):
    python.install()
    (python.root / "acme_patches" / "prelude.py").unlink()
    ended = python.run("import acme")
    assert ended.returncode == 1 and "Traceback" in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert (
        last.startswith("ImportError: acme should be imported with the patches of") and "Put them back, or rem" in last
    )
    assert str(python.root) in last and str(startup.files_of(PACKAGE, python.site)[1]) in last
    assert python.run("import json").returncode == 0


def test_error_inside_the_prelude_is_its_own(python):
    python.install()
    (python.root / "acme_patches" / "prelude.py").write_text("import no_such_module\n")
    assert python.run("import acme").stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'no_such_module'"


def test_patches_on_the_path_come_before_the_root(python):
    """A checkout that a user works in, or the workspace, is not mixed with the installed one."""
    python.install()
    (python.elsewhere / "acme_patches").mkdir()
    (python.elsewhere / "acme_patches" / "prelude.py").write_text(f"{PRELUDE_TEXT}TIMES = 'elsewhere'\n")
    assert python.said(f"import acme; {SEEN}") == ["SourceFileLoader", 7, "elsewhere", 0]
