"""Run files of another project's tests with pytest, each in a process that is forked after the imports they share.

    python forked_pytest.py RESULTS JOBS LIMIT_S ROOT FILE ...

Start it by its path, so that `import tests` finds the other project's package. For each file it writes to RESULTS
pytest's report, ``<its path in ROOT, "+" for "/">.xml``, and its output and exit code, under that name with ``.log``.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import sys
from pathlib import Path

# The modules that take longest to import.
IMPORTS = (
    "torch",
    "torch_npu",
    "transformers",
    "vllm",
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm_ascend",
    "pytest",
)


def name_of(file: Path, root: Path) -> str:
    """Return the name of a file's results."""
    return str(file.relative_to(root)).replace("/", "+")


def _run_file(file: Path, root: Path, report: Path, log: Path) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.chdir(root)
    os.environ["NPU_EMULATOR_NODE"] = f"forked-{os.getpid()}"
    import pytest

    partial = report.with_suffix(".partial")  # renamed once it is complete
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", f"--rootdir={root}", f"--junitxml={partial}"]
    code = int(pytest.main([*options, str(file)]))
    if partial.exists():
        partial.rename(report)
    sys.stdout.flush()
    os._exit(code)  # the tested code's threads may never end


def _run_in_a_process(file: Path, root: Path, results: Path, limit: float) -> None:
    report, log = (results / f"{name_of(file, root)}{end}" for end in (".xml", ".log"))
    process = multiprocessing.get_context("fork").Process(target=_run_file, args=(file, root, report, log))
    process.start()
    process.join(limit)
    code = process.exitcode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the process and leftovers of its tests
    process.join()
    with log.open("a") as written:
        written.write("\nthe time limit ended it\n" if code is None else f"\nthe process ended with code {code}\n")


def main(results: Path, jobs: int, limit: float, root: Path, files: list[Path]) -> None:
    del sys.path[0]  # this file's folder
    for module in IMPORTS:
        __import__(module)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda file: _run_in_a_process(file, root, results, limit), files))


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        float(sys.argv[3]),
        Path(sys.argv[4]),
        [Path(each) for each in sys.argv[5:]],
    )
