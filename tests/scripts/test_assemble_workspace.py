"""scripts/assemble_workspace.sh on a temporary project: the overlay's folders next to temporary upstreams."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
WORKERS = '"""Workers."""\n\nfrom __future__ import annotations\n\nimport os\n\n\ndef work(x):\n    return x\n'
PATCH = """
from overlay import Feature, wrap


@wrap("verl.workers.megatron_workers:work", feature=Feature("testing", "a test"), why="a test",
      upstream="not forwarded: a test", remove_when="never")
def work(upstream, x):
    return ("ours", upstream(x))
"""
SERIES_PATCH = """--- a/vllm_ascend/core.py
+++ b/vllm_ascend/core.py
@@ -1 +1 @@
-VALUE = 1
+VALUE = 2
"""
PINS = """
[verl]
packages = ["verl"]
patch_package = "verl_patches"
cluster = {{ repository = "{folder}/verl", commit = "{commit}" }}

[vllm-ascend]
packages = ["vllm_ascend"]
patch_package = "vllm_ascend_patches"
cluster = {{ repository = "{folder}/vllm-ascend", reference = "v1" }}
"""


SETUP = """
from setuptools import setup

setup(name="vllm-ascend", entry_points={"vllm.platform_plugins": ["ascend = vllm_ascend:register"]})
"""


class Project:
    """A user's fork with the overlay's folders in it, and checkouts of two upstreams next to it."""

    def __init__(self, folder: Path) -> None:
        self.checkouts = folder / "checkouts"
        self.root = folder / "fork"
        self.write(self.checkouts / "verl", {"verl/__init__.py": "", "verl/workers/megatron_workers.py": WORKERS})
        self.write(
            self.checkouts / "vllm-ascend",
            {"vllm_ascend/__init__.py": "", "vllm_ascend/core.py": "VALUE = 1\n", "setup.py": SETUP},
        )
        commit = self.commit("verl")
        self.commit("vllm-ascend")
        self.git("vllm-ascend", "tag", "v1")
        shutil.copytree(REPOSITORY / "overlay", self.root / "overlay", ignore=shutil.ignore_patterns("__pycache__"))
        scripts = ("assemble_workspace.sh", "lib/terminal.sh", "lib/arguments.sh", "internal/write_metadata.py")
        for name in (*(f"scripts/{script}" for script in scripts), "verl_patches/prelude_patch.py"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, self.root / name)
        self.write(
            self.root,
            {
                "overlay/pins.toml": PINS.format(folder=self.checkouts, commit=commit),
                "verl_patches/workers/megatron_workers.py": PATCH,
                "vllm_ascend_patches/series": "# in order\n\nvalue.patch\n",
                "vllm_ascend_patches/value.patch": SERIES_PATCH,
            },
        )
        (self.root / "overlay/fingerprints.lock.json").unlink()
        self.python("-m", "overlay", "lock", "--upstream", f"verl={self.checkouts / 'verl'}@{commit}")

    def write(self, folder: Path, files: dict[str, str]) -> None:
        """Write files below a folder."""
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    def git(self, checkout: str, *arguments: str) -> str:
        """Run git in one of the checkouts."""
        command = ["git", "-C", str(self.checkouts / checkout), "-c", "user.name=t", "-c", "user.email=t", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, checkout: str) -> str:
        """Commit everything in a checkout, and return the commit."""
        if not (self.checkouts / checkout / ".git").exists():
            self.git(checkout, "init", "-q")
        self.git(checkout, "add", "-A")
        self.git(checkout, "commit", "-qm", "all")
        return self.git(checkout, "rev-parse", "HEAD")

    def python(self, *arguments: str) -> str:
        """Run Python in the fork, with nothing else on its path."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, *arguments]
        options = {"cwd": self.root, "env": environment, "capture_output": True, "text": True}
        return subprocess.run(command, check=True, **options).stdout.strip()

    def assemble(self, *arguments: str) -> subprocess.CompletedProcess:
        """Run the script."""
        environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "HOME": str(self.root)}
        command = ["bash", str(self.root / "scripts/assemble_workspace.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)

    def present(self) -> bool:
        """Return whether the fork has any files of the upstreams, of the manifest or of the staging folder."""
        names = ("verl", "vllm_ascend", ".workspace", ".workspace.new", "vllm_ascend-*.dist-info")
        return any(found for name in names for found in self.root.glob(name))

    def plugins(self) -> str:
        """Return version and platform plugin of vLLM-Ascend as a process in the fork finds them."""
        script = (
            "import importlib.metadata as m; (plugin,) = m.entry_points(group='vllm.platform_plugins'); "
            "print(m.version('vllm-ascend'), plugin.name, plugin.value)"
        )
        # -S: without site-packages, where vLLM-Ascend is installed here.
        return self.python("-S", "-c", script)

    def use(self) -> str:
        """Return the patched function's result in a process that only knows the fork."""
        script = "import verl.workers.megatron_workers as m, overlay; overlay.assert_effective(); print(m.work(1))"
        return self.python("-c", script)


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def test_it_assembles_a_working_workspace_again_and_undoes_it(project):
    for _ in range(2):
        result = project.assemble("--from", str(project.checkouts))
        assert result.returncode == 0, result.stdout + result.stderr
        lines = (project.root / "verl/workers/megatron_workers.py").read_text().splitlines()
        assert lines[2:5] == [
            "from __future__ import annotations",
            "",
            "from verl_patches import prelude_patch  # noqa: F401",
        ]
        assert sum("prelude_patch" in line for line in lines) == 1
        # Every import of verl activates the patches, be it from FSDP's workers or from any program.
        assert (project.root / "verl/__init__.py").read_text().count("prelude_patch") == 1
        assert project.python("-c", "import verl, overlay; print(len(overlay.report().pending))") == "1"
        assert (project.root / "vllm_ascend/core.py").read_text() == "VALUE = 2\n"
        assert project.use() == "('ours', 1)"
    assert (project.checkouts / "verl/verl/workers/megatron_workers.py").read_text() == WORKERS
    assert project.assemble("--undo").returncode == 0 and not project.present()
    assert "nothing to undo" in project.assemble("--undo").stdout


def test_the_workspace_holds_the_metadata_by_which_vllm_finds_its_platform(project):
    with pytest.raises(subprocess.CalledProcessError):
        project.plugins()
    for version in ("1", "2"):
        pins = project.root / "overlay/pins.toml"
        pins.write_text(pins.read_text().replace('"v1"', f'"v{version}"'))
        result = project.assemble("--from", str(project.checkouts), "--any-commit")
        assert result.returncode == 0, result.stderr
        assert project.plugins() == f"{version} ascend vllm_ascend:register"
    assert [path.name for path in project.root.glob("*.dist-info")] == ["vllm_ascend-2.dist-info"]


def test_a_checkout_without_the_platform_plugin_rejected(project):
    (project.checkouts / "vllm-ascend" / "setup.py").write_text(SETUP.replace("platform_plugins", "others"))
    result = project.assemble("--from", str(project.checkouts), "--any-commit")
    rejected(result, "vllm_ascend: its metadata cannot be written")
    assert "declares no entry point vllm.platform_plugins" in result.stderr and not project.present()


def test_it_clones_at_the_pins_what_is_not_there(project, tmp_path):
    project.write(project.checkouts / "verl", {"verl/later.py": ""})
    project.commit("verl")
    result = project.assemble("--from", str(tmp_path / "empty"), "--clone")
    assert result.returncode == 0, result.stderr
    assert not (project.root / "verl/later.py").exists() and not (project.root / "verl/.git").exists()


def rejected(result: subprocess.CompletedProcess, text: str) -> None:
    assert result.returncode == 2 and text in result.stderr, result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_other_sources_rejected_before_anything_changes(project, tmp_path):
    checkouts = str(project.checkouts)
    rejected(project.assemble("--from", str(tmp_path / "empty")), "verl/verl does not exist. Pass verl=FOLDER")
    project.write(project.checkouts / "verl", {"verl/__init__.py": "changed = 1\n"})
    rejected(project.assemble("--from", checkouts), "has changes under verl")
    head = project.commit("verl")
    rejected(project.assemble("--from", checkouts), f"is at {head}, but the pin is")
    shutil.rmtree(project.checkouts / "verl/.git")
    rejected(project.assemble("--from", checkouts), "is not a git checkout")
    assert not project.present()
    assert project.assemble("--from", checkouts, "--any-commit").returncode == 0


def test_sources_that_do_not_fit_the_patches_rejected(project):
    project.write(project.checkouts / "verl", {"verl/workers/megatron_workers.py": WORKERS.replace("(x)", "(x, y)")})
    result = project.assemble("--from", str(project.checkouts), "--any-commit")
    rejected(result, "do not apply to these sources")
    assert "SIGNATURE  verl.workers.megatron_workers:work" in result.stdout and not project.present()


def test_a_series_that_does_not_apply_changes_nothing(project):
    (project.root / "vllm_ascend_patches/value.patch").write_text(SERIES_PATCH.replace("VALUE = 1", "VALUE = 7"))
    rejected(project.assemble("--from", str(project.checkouts)), "series does not apply")
    assert not project.present()


def test_it_overwrites_and_removes_only_what_it_put_there_unchanged(project):
    project.write(project.root, {"verl/mine.py": ""})
    rejected(project.assemble("--from", str(project.checkouts)), "was not copied by this script")
    shutil.rmtree(project.root / "verl")
    assert project.assemble("--from", str(project.checkouts)).returncode == 0
    project.write(project.root, {"verl/mine.py": ""})
    rejected(project.assemble("--from", str(project.checkouts)), "was changed after the copy")
    rejected(project.assemble("--undo"), "was changed after the copy")
    assert (project.root / "verl/mine.py").exists() and (project.root / "vllm_ascend").exists()
    assert project.assemble("--undo", "--discard").returncode == 0 and not project.present()


def forked(project: Project) -> Project:
    """Put the packages into the fork itself, as in a user's own repository."""
    for checkout, package in (("verl", "verl"), ("vllm-ascend", "vllm_ascend")):
        shutil.copytree(project.checkouts / checkout / package, project.root / package)
    return project


def in_place(project: Project) -> subprocess.CompletedProcess:
    return project.assemble("--in-place", f"vllm_ascend={project.checkouts / 'vllm-ascend'}")


def test_a_fork_is_prepared_where_it_lies_and_a_second_time_nothing_changes(project):
    forked(project)
    result = in_place(project)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (project.root / "vllm_ascend/core.py").read_text() == "VALUE = 2\n"
    assert project.use() == "('ours', 1)" and project.plugins() == "1 ascend vllm_ascend:register"
    assert not (project.root / ".workspace").exists() and not (project.root / ".workspace.new").exists()
    stamps = {path: path.stat().st_mtime_ns for path in project.root.rglob("*.py")}
    again = project.assemble("--in-place")
    assert again.returncode == 0 and "already has the patches of vllm_ascend_patches/series" in again.stdout
    assert stamps == {path: path.stat().st_mtime_ns for path in project.root.rglob("*.py")}
    # This script copied nothing in the fork, so it removes nothing.
    assert "nothing to undo" in project.assemble("--undo").stdout and (project.root / "verl").is_dir()


def test_a_fork_that_cannot_be_prepared_stays_as_it_is(project):
    rejected(project.assemble("--in-place"), "has no package of overlay/pins.toml")
    forked(project)
    # The package alone does not show which plugins it has.
    rejected(project.assemble("--in-place", "--from", "/nowhere"), "vllm_ascend: its metadata cannot be written")
    (project.root / "vllm_ascend/core.py").write_text("VALUE = 7\n")
    rejected(in_place(project), "series does not apply")
    (project.root / "vllm_ascend/core.py").write_text("VALUE = 1\n")
    (project.root / "verl/workers/megatron_workers.py").write_text(WORKERS.replace("(x)", "(x, y)"))
    rejected(in_place(project), "the patches do not apply to these sources")
    assert "prelude" not in (project.root / "verl/workers/megatron_workers.py").read_text()
    assert (project.root / "vllm_ascend/core.py").read_text() == "VALUE = 1\n"
    assert not list(project.root.glob("*.dist-info")) and not (project.root / ".workspace.new").exists()


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--from"], "--from needs a folder"),
        (["--wrong"], 'Unknown argument "--wrong"'),
        (["--stack", "2026"], "--stack=2026 is invalid: its patches are not copied into a checkout"),
        (["--stack", "2024"], "--stack=2024 is invalid: no such stack"),
        (["acme=/tmp"], "acme is not a package"),
    ],
)
def test_wrong_arguments_are_one_sentence(project, arguments, text):
    rejected(project.assemble("--from", str(project.checkouts), *arguments), text)
    assert not project.present()
