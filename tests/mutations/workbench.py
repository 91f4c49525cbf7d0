"""A copy of the tree in which faults are planted one at a time, and the tests that are run there."""

from __future__ import annotations

import os
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

from post_training.environment_files import read_environment
from rehearsal.plan import ENVIRONMENT_FILE
from rehearsal.processes import SignalFlag, run_to_the_end
from tests.mutations.fault import ROOT, Fault, FaultError

# pytest's exit codes: 1, a test failed; 2, a file of tests could not be imported. 3 is given where importing ends the
# process, and 4 where a conftest.py cannot be imported: the unchanged tree tells both from what was wrong before.
_GREEN, _RED = 0, (1, 2, 3, 4)
_FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\w+)*)", re.MULTILINE)
_CHEAPEST_FIRST = "tests.mutations.cheapest_first"
_EMULATOR_SOURCES = "npu_emulator/src"
_ENGINE, _ENGINE_SOURCES = "cann-engine", "npu_emulator/cann/python"
_EMULATOR_PACKAGES = ("npu_emulator", "torch_npu", "torchair", "acl")


class Outcome(StrEnum):
    """What became of a planted fault."""

    NOTICED = "noticed"
    HUNG = "hung"
    SURVIVED = "survived"

    @property
    def counts_as_noticed(self) -> bool:
        """A test that hangs is stopped by its time limit and fails, in the whole run of the tests too."""
        return self is not Outcome.SURVIVED


@dataclass(frozen=True)
class Verdict:
    """The outcome of one trial.

    ``by`` is the test that failed, without its parameters; where none is known (a hang, a crash) all that was asked;
    where the fault survived nothing. ``seconds`` is how long the trial took.
    """

    outcome: Outcome
    by: tuple[str, ...]
    seconds: float


class TimeLimit(Exception):
    """The tests ran longer than they may."""


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
        # Some tests ask git which files there are.
        for command in (["init", "-q"], ["add", "-A"]):
            subprocess.run(["git", *command], cwd=self._tree, check=True, capture_output=True)
        (self._tree / ".venv").symlink_to(sys.prefix)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def try_fault(self, fault: Fault) -> Verdict:
        """Plant a fault, ask its tests tier by tier whether they notice, and take it out again.

        The verdict means something only if :meth:`require_green` has accepted the tests that noticed.

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
        """Run tests on the unchanged tree, in one session.

        Raises:
            FaultError: one of them fails without any fault, so that it says nothing about any.
        """
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
        """Run tests in the copy; returns pytest's exit code, negative where a signal ended it."""
        deadline = self._clock() + factor * self._limit_s

        def watch() -> None:
            if self._clock() > deadline:
                raise TimeLimit

        if (self._tree / _CHEAPEST_FIRST.replace(".", "/")).with_suffix(".py").exists():
            options = ("-p", _CHEAPEST_FIRST, *options)
        command = [self._interpreter(file), "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *selectors]
        self._log.unlink(missing_ok=True)
        return run_to_the_end(command, self._variables(file), self._tree, self._log, self._signals, watch)

    def _variables(self, file: str) -> Mapping[str, str]:
        """The environment of a run; a changed file of the emulator goes before the installed one."""
        path = [str(self._tree)]
        if file.startswith(_EMULATOR_SOURCES):
            self._link_extensions()
            path.insert(0, str(self._tree / _EMULATOR_SOURCES))
        return {**read_environment(ENVIRONMENT_FILE), "PYTHONPATH": os.pathsep.join(path)}

    def _interpreter(self, file: str) -> str:
        """The environment's Python; for a file that set-up copies there, one of an environment which has the tree's."""
        if not file.startswith(_ENGINE_SOURCES):
            return sys.executable
        prefix, sources = self._folder / "environment", self._tree / _ENGINE_SOURCES
        if not prefix.exists():
            (prefix / _ENGINE).mkdir(parents=True)
            for each in [*Path(sys.prefix).iterdir(), *(Path(sys.prefix) / _ENGINE).iterdir()]:
                link, own = prefix / each.relative_to(sys.prefix), sources / each.name
                if not link.exists():
                    link.symlink_to(own if own.exists() and link.parent.name == _ENGINE else each)
        return str(prefix / "bin" / "python")

    def _link_extensions(self) -> None:
        """Put the emulator's compiled modules beside its sources, as an installation has them."""
        installed = Path(get_path("platlib"))
        for package in _EMULATOR_PACKAGES:
            for library in (installed / package).rglob("*.so"):
                link = self._tree / _EMULATOR_SOURCES / library.relative_to(installed)
                if not link.exists():
                    link.symlink_to(library)
