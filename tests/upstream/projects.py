"""Run whole projects' unmodified test suites, with a reason for each failure.

    python -m tests.upstream.projects --upstream FOLDER --project NAME
        [--file PART ...] [--limit SECONDS] [--test-limit SECONDS]
        [--keep FOLDER] [--report FILE]

FOLDER holds the checkouts, into which tests may write. Every test file is one
``python -m npu_emulator run -- python -m pytest FILE``; one that exceeds the
limit is ended with all its processes and counts as one failure. Patterns in
`projects.toml` give the reasons of failures; a failure without a matching
pattern is "not looked into".
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.upstream.op_plugin import Outcome, share

TABLE = Path(__file__).with_name("projects.toml")
STARTED = Path(__file__).with_name("started_processes")
UNKNOWN = "not looked into"


@dataclass(frozen=True)
class Project:
    """The location of a project's tests.

    Attributes:
        checkout: name of the checkout below FOLDER.
        tests: patterns of files in the checkout.
        on_path: folders to import from, below FOLDER or absolute.
        chip: the emulated chip.
    """

    checkout: str
    tests: tuple[str, ...]
    on_path: tuple[str, ...] = ()
    chip: str = "Ascend910B3"


PROJECTS = {
    "vllm-ascend": Project("vllm-ascend", ("tests/ut/**/test_*.py",)),
    "torch_npu": Project(
        "pytorch",
        ("test/npu/test_*.py", "test/custom_ops/test_*.py", "test/distributed/test_*.py"),
        ("pytorch/test", str(STARTED)),
    ),
    "MindSpeed": Project(
        "MindSpeed",
        ("tests_extend/unit_tests/**/test_*.py",),
        ("MindSpeed", "Megatron-LM", "MindSpeed/tests_extend"),
    ),
}


def files(folder: Path, project: Project, parts: Iterable[str] = ()) -> list[Path]:
    """Return the project's test files, or those with one of `parts` in their path."""
    root = folder / project.checkout
    found = sorted({path for pattern in project.tests for path in root.glob(pattern)})
    wanted = list(parts)
    return [path for path in found if not wanted or any(part in str(path.relative_to(root)) for part in wanted)]


def read_report(file: str, report: Path, ending: str) -> Outcome:
    """Return a file's outcome from pytest's XML report; `ending` says how the process ended if there is no report."""
    if not report.exists():
        return Outcome(file, failed={"(the file)": ending})
    passed, skipped, failed = 0, {}, {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        problem = next((found for tag in ("failure", "error") if (found := case.find(tag)) is not None), None)
        skip = case.find("skipped")
        if problem is not None:
            failed[name] = " ".join(f"{problem.get('message')} {(problem.text or '')[-600:]}".split())
        elif skip is not None:
            skipped[name] = skip.get("message") or ""
        else:
            passed += 1
    return Outcome(file, passed, skipped, failed)


def run_file(test: Path, folder: Path, project: Project, limit: float, test_limit: float = 0) -> Outcome:
    """Run one test file on dies of its own, for at most `limit` seconds, and each test for `test_limit`.

    A test whose processes failed may wait for them forever. pytest-timeout ends it, and the tests after it still run.
    """
    root = folder / project.checkout
    path = [
        *(str(folder / name) for name in project.on_path),
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        # Tests start "python" and "torchrun" themselves.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "TASK_QUEUE_ENABLE": "0",  # a rejection in the queue would end all later work of a file
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",  # tests that need a hub fail at once instead of after retries
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = [sys.executable, "-m", "npu_emulator", "run", "--chip", project.chip]
        command += ["--capacity", str(32 << 10), "--", sys.executable, "-W", "ignore", "-m", "pytest", "-q"]
        command += ["-p", "no:cacheprovider", f"--rootdir={root}", f"--junitxml={report}", str(test)]
        command += [f"--timeout={test_limit}", "--timeout-method=signal"] if test_limit else []
        with Path(scratch, "output").open("w+") as output:
            process = subprocess.Popen(
                command, cwd=test.parent, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                ending = f"the process ended with code {process.wait(limit)}"
            except subprocess.TimeoutExpired:
                ending = "the time limit ended it"
            try:
                os.killpg(process.pid, signal.SIGKILL)  # processes that its tests may have left
            except ProcessLookupError:
                pass
            process.wait()
            output.seek(0)
            ending += ": " + " ".join(output.read()[-400:].split())
        return read_report(str(test.relative_to(root)), report, ending)


def classify(outcomes: Iterable[Outcome], table: Sequence[dict[str, str]]) -> Counter[tuple[str, str]]:
    """Count the failures by (kind, reason) of the first entry of the table that fits each."""
    counted: Counter[tuple[str, str]] = Counter()
    for outcome in outcomes:
        for name, words in outcome.failed.items():
            text = f"{outcome.file} {name} {words}"
            entry = next((entry for entry in table if re.search(entry["pattern"], text)), None)
            counted[(entry["kind"], entry["reason"]) if entry else (UNKNOWN, "")] += 1
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--project", choices=PROJECTS, required=True)
    parser.add_argument("--file", nargs="*", default=(), metavar="PART", help="only files with this in their path")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="for one file")
    parser.add_argument(
        "--test-limit", type=float, default=0, metavar="SECONDS", help="for one test; needs pytest-timeout"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep outcomes, and go on where a run stopped")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write all outcomes as JSON")
    options = parser.parse_args()
    project, folder = PROJECTS[options.project], options.upstream.resolve()
    tests = files(folder, project, options.file)
    if not tests:
        parser.error(f"{folder / project.checkout} holds no such files of tests")
    with tempfile.TemporaryDirectory() as scratch:
        kept = options.keep or Path(scratch)
        kept.mkdir(parents=True, exist_ok=True)
        outcomes = []
        for test in tests:
            cache = kept / (str(test.relative_to(folder)).replace("/", "+") + ".json")
            if not cache.exists():
                cache.write_text(json.dumps(vars(run_file(test, folder, project, options.limit, options.test_limit))))
            outcomes.append(Outcome(**json.loads(cache.read_text())))
            last = outcomes[-1]
            print(f"{last.file:70} {last.passed} passed, {len(last.failed)} failed, {len(last.skipped)} skipped")
    passed, ran = share(outcomes)
    print(f"{passed} of {ran} tests that ran passed ({passed / max(ran, 1):.1%}), in {len(outcomes)} files")
    for (kind, reason), number in sorted(classify(outcomes, tomllib.loads(TABLE.read_text())["failure"]).items()):
        print(f"{number:5} {kind}{': ' if reason else ''}{reason}")
    if options.report:
        options.report.write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1))


if __name__ == "__main__":
    main()
