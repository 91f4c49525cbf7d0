"""A copy of the tree in which mutants are planted one at a time, and the tests that run there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from sysconfig import get_path

from post_training.processes.command import SignalFlag, run_to_the_end
from rehearsal.environment import environment_of
from tests.mutations.fault import ROOT, Fault, FaultError
from tests.mutations.selection import of_other_stack

# pytest's exit codes: 1, a test failed; 2, a test file could not be imported; 3, importing ended the process; 4, a
# conftest.py could not be imported. A run on the unchanged tree tells 3 and 4 from errors that were there before.
_GREEN, _RED = 0, (1, 2, 3, 4)
_FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\w+)*)", re.MULTILINE)
_CHEAPEST_FIRST = "tests.mutations.cheapest_first"
# The environment that scripts/test.sh makes for the other stack's tests, and the chip that they emulate.
OTHER_ENVIRONMENT, _OTHER_CHIP = ".venv-2026", "a2"
# Packages that set-up installs from the tree, and that Python imports when it starts.
_INSTALLED_FROM = "npu_emulator/src"
_COMPILED_FROM = "npu_emulator/csrc"
COMPILE = """
import sys
from pathlib import Path

from build import build_cann
from setup import installed_torch_npu

build_cann(installed_torch_npu(), Path(sys.argv[1]))
"""


class Outcome(StrEnum):
    """The outcome of a mutant."""

    NOTICED = "noticed"
    HUNG = "hung"
    SURVIVED = "survived"

    @property
    def counts_as_noticed(self) -> bool:
        """Whether the mutant is killed. A hanging test counts, since its time limit fails it in the full run too."""
        return self is not Outcome.SURVIVED


@dataclass(frozen=True)
class Verdict:
    """The result of one trial.

    ``by`` is the test that failed, without its parameters; if it is unknown (a hang, a crash), all tests that ran; if
    the mutant survived, empty. ``seconds`` is the duration of the trial.
    """

    outcome: Outcome
    by: tuple[str, ...]
    seconds: float


class TimeLimit(Exception):
    """The tests exceeded their time limit."""


class Workbench:
    """A copy of the tree at ``root``. Use as a context manager; the copy is removed at the end.

    ``limit_s`` bounds one run of pytest, in seconds of ``clock``.
    """

    def __init__(
        self, signals: SignalFlag, limit_s: float, root: Path = ROOT, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._signals, self._limit_s, self._source, self._clock = signals, limit_s, root, clock

    def __enter__(self) -> Workbench:
        self._folder = Path(tempfile.mkdtemp(prefix="mutations-"))
        self._tree, self._log = self._folder / "tree", self._folder / "pytest.log"
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=self._source, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (self._source / name).exists():
                target = self._tree / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self._source / name, target, follow_symlinks=False)
        # Some tests ask git for the list of files.
        for command in (["init", "-q"], ["add", "-A"]):
            subprocess.run(["git", *command], cwd=self._tree, check=True, capture_output=True)
        (self._tree / ".venv").symlink_to(sys.prefix)
        if (self._source / OTHER_ENVIRONMENT).exists():
            (self._tree / OTHER_ENVIRONMENT).symlink_to((self._source / OTHER_ENVIRONMENT).resolve())
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def try_fault(self, fault: Fault) -> Verdict:
        """Plant a mutant, run its tests tier by tier until one kills it, and restore the file.

        The verdict is meaningful only if :meth:`require_green` has accepted the tests that killed it.

        Raises:
            Interrupted: a signal ended the trial.
        """
        begun = self._clock()
        for tier in fault.tiers:
            outcome, by = self._planted(fault, tier)
            if outcome.counts_as_noticed:
                return Verdict(outcome, by, self._clock() - begun)
        return Verdict(Outcome.SURVIVED, (), self._clock() - begun)

    def require_green(self, tests: Sequence[str]) -> None:
        """Run tests on the unchanged tree, in one session of each stack.

        Raises:
            FaultError: one of them fails without any mutant, so its failures say nothing.
        """
        for other in (False, True):
            if of_stack := [test for test in tests if of_other_stack([test]) is other]:
                self._require_green(of_stack)

    def _require_green(self, tests: Sequence[str]) -> None:
        try:
            status = self._run(tests, "", "--maxfail=20", factor=len(tests))
        except TimeLimit:
            raise FaultError("The tests took too long without any fault: raise --limit.") from None
        if status == _GREEN:
            return
        output = self._log.read_text(errors="replace")
        red = sorted(set(_FAILED_TEST.findall(output))) or output.splitlines()[-15:]
        raise FaultError(f"Tests failed without any fault, so they say nothing; mend them first: {', '.join(red)}.")

    def _planted(self, fault: Fault, tier: tuple[str, ...]) -> tuple[Outcome, tuple[str, ...]]:
        changed = self._tree / fault.file
        original = changed.read_bytes()
        changed.write_text(fault.source, encoding="utf-8")
        try:
            status = self._run(tier, fault.file, "-x")
        except TimeLimit:
            return Outcome.HUNG, tier
        finally:
            changed.write_bytes(original)
        if status == _GREEN:
            return Outcome.SURVIVED, ()
        if status in _RED or status < 0:
            failed = _FAILED_TEST.search(self._log.read_text(errors="replace"))
            return Outcome.NOTICED, (failed[1],) if failed else tier
        raise FaultError(f"pytest ended with code {status} for {fault.name}; the selectors are {' '.join(tier)}.")

    def _run(self, selectors: Sequence[str], file: str, *options: str, factor: int = 1) -> int:
        """Run tests in the copy. Return pytest's exit code, which is negative if a signal ended it."""
        deadline = self._clock() + factor * self._limit_s

        def watch() -> None:
            if self._clock() > deadline:
                raise TimeLimit

        if (self._tree / _CHEAPEST_FIRST.replace(".", "/")).with_suffix(".py").exists():
            options = ("-p", _CHEAPEST_FIRST, *options)
        other = of_other_stack(selectors)
        python = str(self._tree / OTHER_ENVIRONMENT / "bin" / "python") if other else self._interpreter(file)
        command = [python, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *selectors]
        self._log.unlink(missing_ok=True)
        return run_to_the_end(command, self._variables(other), self._tree, self._log, self._signals, watch)

    def _variables(self, other: bool) -> Mapping[str, str]:
        """Return the environment variables of a run."""
        variables = environment_of("2026", _OTHER_CHIP) if other else environment_of("2025")
        return {**variables, "PYTHONPATH": str(self._tree)}

    def _interpreter(self, file: str) -> str:
        """Return the Python to run tests with.

        For files that set-up installs or compiles, it is that of a separate environment with the copy's packages.
        """
        compiled = file.startswith(_COMPILED_FROM)
        if not compiled and not file.startswith(_INSTALLED_FROM):
            return sys.executable
        installed = Path(get_path("purelib"))
        prefix = self._folder / ("compiled" if compiled else "environment")
        site = prefix / installed.relative_to(sys.prefix)
        if compiled:
            self._compile(site / "npu_emulator")
        if not (prefix / "bin").exists():
            for package in filter(Path.is_dir, (self._tree / _INSTALLED_FROM).iterdir()):
                _link_what_is_missing(package, site / package.name)
                _link_what_is_missing(installed / package.name, site / package.name)  # files built next to its modules
            for folder in (site, *site.parents):
                _link_what_is_missing(sys.prefix / folder.relative_to(prefix), folder)
                if folder == prefix:
                    break
        return str(prefix / "bin" / "python")

    def _compile(self, package: Path) -> None:
        """Compile what changed since the last build, and put the libraries into a package.

        Raises:
            FaultError: the tree's sources do not compile.
        """
        done = subprocess.run(
            [sys.executable, "-c", COMPILE, package], cwd=self._tree / "npu_emulator", capture_output=True, text=True
        )
        if done.returncode:
            raise FaultError(f"The fault does not compile: {(done.stdout + done.stderr)[-2000:]}")


def _link_what_is_missing(source: Path, target: Path) -> None:
    """Make the folder `target`, and link every entry of `source` that it lacks into it."""
    target.mkdir(parents=True, exist_ok=True)
    for each in source.iterdir():
        if not (target / each.name).exists():
            (target / each.name).symlink_to(each)
