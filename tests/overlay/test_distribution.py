"""The engine is a distribution of its own; its page on another upstream is followed to the letter from its wheel."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OF_THE_PATCHES = ("test_real_*.py", "test_wheel.py", "test_distribution.py", "order_program.py", "__pycache__")
"""The engine's tests that need this project's patches."""
PAGE = (ROOT / "overlay" / "another-upstream.md").read_text()
FENCED = re.compile(r"(?:Make `(?P<file>[\w./]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
SIZES = '"""Format the value like a'
HISTORY = [
    ("Say it in other words", "filters.py", SIZES, '"""Write the value like a'),
    ("Round half up", "filters.py", 'return f"{int(bytes)} Bytes"', 'return f"{round(bytes)} Bytes"'),
    ("Take a locale", "filters.py", "binary: bool = False) -> str:", "binary: bool = False, locale: str = '') -> str:"),
    ("Name inputs", "environment.py", "    def overlay(", "    def inputs(self): ...\n\n    def overlay("),
]
"""The commits in the page's last section: subject, file, text and its replacement, one commit a day."""


def listed() -> list[str]:
    """Return the engine's files."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "overlay"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the engine's folder alone, since building leaves files there."""
    folder = tmp_path_factory.mktemp("distribution")
    for name in listed():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", "./overlay", *options], cwd=folder, check=True, timeout=600)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def interpreter(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and jinja2 with its dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = ["-m", "pip", "--python", str(python), "install", "-q", "--no-index", "--no-deps", str(wheel)]
    subprocess.run([sys.executable, *install], check=True, timeout=600)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in ("jinja2", "markupsafe"):
        for file in importlib.metadata.distribution(name).files or ():
            if not file.parts[0].startswith(".."):
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file.locate(), site / file)
    return python


class Project:
    """A folder that follows the page, with an interpreter of its own."""

    def __init__(self, folder: Path, interpreter: Path) -> None:
        self.folder, self.interpreter = folder, interpreter
        self.site = next(interpreter.parents[1].glob("lib/python*/site-packages"))

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a line of the page in a shell; no bytecode is written, so earlier imports do not matter."""
        path = f"{self.interpreter.parent}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(self.folder)}
        return subprocess.run(["bash", "-c", line], cwd=self.folder, env=environment, capture_output=True, text=True)

    def follow(self, page: str) -> Iterator[tuple[str, str]]:
        """Write the files and run the commands; yields pairs of their output and the output on the page."""
        printed = ""
        for step in FENCED.finditer(page):
            if step["file"]:
                (self.folder / step["file"]).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / step["file"]).write_text(step["text"])
            elif step["kind"] == "bash":
                done = self.run(f"set -e\n{step['text']}")
                assert done.returncode == 0, done.stderr
                printed = done.stdout.replace(str(self.site), "SITE-PACKAGES")
            else:
                yield printed, step["text"]

    def jinja_with_history(self) -> None:
        """Make a checkout `jinja` of the installed package below `src`, with a tag and the commits of HISTORY."""
        source = self.folder / "jinja" / "src" / "jinja2"
        shutil.copytree(self.site / "jinja2", source, ignore=shutil.ignore_patterns("__pycache__"))
        self.commit("Release", 1)
        for day, (subject, name, old, new) in enumerate(HISTORY, 2):
            text = (source / name).read_text()
            assert text.count(old) >= 1, f"jinja2's {name} has no {old!r}"
            where = text.index(old, text.index("def do_filesizeformat") if name == "filters.py" else 0)
            (source / name).write_text(text[:where] + text[where:].replace(old, new, 1))
            self.commit(subject, day)

    def commit(self, subject: str, day: int) -> None:
        git = "git -C jinja -c user.name=t -c user.email=t"
        date = f"2026-01-{day:02}T00:00:00Z"
        lines = [
            "git init -q -b main jinja",
            f"{git} add -A",
            f"export GIT_AUTHOR_DATE={date} GIT_COMMITTER_DATE={date}",
        ]
        lines += [f"{git} commit -q -m '{subject}'", *(["git -C jinja tag 3.1.6"] if day == 1 else [])]
        done = self.run("set -e\n" + "\n".join(lines))
        assert done.returncode == 0, done.stderr


@pytest.fixture
def project(interpreter: Path, tmp_path: Path) -> Project:
    return Project(tmp_path, interpreter)


def shown(page: str, after: str) -> str:
    """Return the first indented block of the page after some words, without hashes."""
    block = re.search(r"\n\n((?:    .*\n)+)", page.partition(after)[2])
    assert block, f"the page has no block after {after!r}"
    return re.sub(r"\b[0-9a-f]{8}\b", "HASH", re.sub(r"^    ", "", block[1], flags=re.M))


@pytest.mark.slow
def test_the_wheel_holds_the_engine_and_nothing_of_this_project(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    assert held == {name for name in listed() if name.endswith((".py", "py.typed"))} and len(held) > 20
    assert "Requires-Dist" not in metadata and "# overlay: patches of pinned packages that fail loudly" in metadata


@pytest.mark.slow
def test_the_page_is_true_from_an_empty_folder(project):
    sections = [(printed, says) for printed, says in project.follow(PAGE)]
    assert len(sections) == 2 and all(printed == says for printed, says in sections), sections
    table = (project.folder / "patches.md").read_text()
    assert "| `jinja2.filters:do_filesizeformat` | wrap | binary_sizes |" in table
    alone = project.run("python -m overlay list")
    assert alone.returncode == 2 and "names the upstreams. Pass yours, as with --pins FILE" in alone.stderr


@pytest.mark.slow
def test_an_upstream_that_changed_rejected_and_found_in_its_history(project):
    list(project.follow(PAGE))
    project.jinja_with_history()
    walk = "python -m overlay --pins pins.toml bisect --upstream jinja2=jinja 3.1.6..main"
    walked = project.run(walk)
    assert walked.returncode == 1, walked.stderr
    assert re.sub(r"\b[0-9a-f]{8}\b", "HASH", walked.stdout) == shown(PAGE, "makes such a history")
    clean = project.run(f"{walk}~3")  # up to the commit that only changes words
    assert clean.returncode == 0 and clean.stdout.count("changes: never") == 2

    for commit, code, words in [("3.1.6", 0, "clean"), ("main", 1, "SIGNATURE")]:
        checked = project.run(f"python -m overlay --pins pins.toml check --upstream jinja2=jinja@{commit}")
        assert checked.returncode == code and words in checked.stdout
    (file,) = project.site.glob("jinja2/filters.py")
    released = file.read_text()
    try:
        file.write_text(released.replace(HISTORY[1][2], HISTORY[1][3]))
        stopped, checked = project.run("python program.py"), project.run("python -m overlay --pins pins.toml check")
        assert stopped.returncode == 1 and checked.returncode == 1
        said = " ".join(shown(PAGE, "Somebody installs").split())
        pieces = [piece.strip(" .)") for piece in re.split(r"\.\.\.", said)]
        assert all(piece in " ".join(stopped.stderr.split()) for piece in pieces), stopped.stderr
        (project.folder / "pins.toml").write_text(
            'accept_drift = ["jinja2.filters:do_filesizeformat"]\n' + (project.folder / "pins.toml").read_text()
        )
        assert "disk has 1.9 MiB" in project.run("python program.py").stdout
    finally:
        file.write_text(released)


@pytest.mark.exhaustive
def test_the_wheel_passes_the_engines_tests_with_nothing_else_of_this_project(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    shutil.copytree(
        ROOT / "tests" / "overlay", tmp_path / "tests" / "overlay", ignore=shutil.ignore_patterns(*OF_THE_PATCHES)
    )
    (tmp_path / "conftest.py").write_text("")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "tests"]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-3000:] + ran.stderr[-1000:]
