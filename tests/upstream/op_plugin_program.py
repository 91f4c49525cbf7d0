"""Files of op-plugin's operator tests, unmodified, on the emulator; started by `tests.upstream.op_plugin`.

    python -m tests.upstream.op_plugin_program RESULTS JOBS LIMIT_S FILE ...

Each file runs in a process of its own, forked from one that has imported torch. Into RESULTS goes ``<file>.json``: the
number of tests passed and, by the test's name, why others were skipped or failed.
"""

import concurrent.futures
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import types
import unittest
from pathlib import Path


def _do_without_expecttest() -> None:
    """Replace expecttest, which torch's own test module imports for checks that no operator test uses."""
    if importlib.util.find_spec("expecttest") is None:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase


class _Result(unittest.TestResult):
    """Counts passed tests, and keeps the messages of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.passed += 1

    def record(self) -> dict:
        failed = {test.id(): _raised(text) for test, text in (*self.failures, *self.errors)}
        return {"passed": self.passed, "skipped": {t.id(): why for t, why in self.skipped}, "failed": failed}


def _raised(traceback: str) -> str:
    """Return the exception without its location: torch_npu's errors have several lines, and CANN's are the last."""
    lines = [line for line in traceback.splitlines() if line and not line[0].isspace()]
    return " ".join(line for line in lines if not line.startswith("Traceback")) or traceback.strip()


def _use_shared_files() -> None:
    """Share tensors between processes through files: a rank may end before its result has been taken."""
    import torch.multiprocessing

    torch.multiprocessing.set_sharing_strategy("file_system")


def _run_file(file: Path, result: Path) -> None:
    os.setsid()
    sys.path.insert(0, str(file.parent))
    outcome = _Result()
    unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(file.stem)).run(outcome)
    partial = result.with_suffix(".partial")  # an existing file is complete
    partial.write_text(json.dumps(outcome.record()))
    partial.rename(result)


def _run_in_a_process(file: Path, results: Path, limit: float) -> None:
    """Run one file; if it ends without a result or exceeds the time limit, it has failed."""
    result = results / f"{file.stem}.json"
    process = multiprocessing.get_context("fork").Process(target=_run_file, args=(file, result))
    process.start()
    process.join(limit)
    said = f"ended with {process.exitcode}" if process.exitcode is not None else f"not finished after {limit:g} s"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the process, and any that a failed test has left
    process.join()
    if not result.exists():
        result.write_text(json.dumps({"failed": {file.name: said}}))


def main(results: Path, jobs: int, limit: float, files: list[Path]) -> None:
    import torch_npu.testing.testcase  # noqa: F401

    several_ranks = threading.Lock()  # all test files that start ranks use the same port

    def run(file: Path) -> None:
        with several_ranks if "multiprocessing" in file.read_text() else contextlib.nullcontext():
            _run_in_a_process(file, results, limit)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, files))


# Not below the guard: processes that a test starts import this module too.
_do_without_expecttest()
_use_shared_files()

if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), [Path(name) for name in sys.argv[4:]])
