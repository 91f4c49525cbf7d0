"""Run op-plugin's unmodified tests of torch_npu's operators on the emulator.

    python -m tests.upstream.op_plugin --upstream FOLDER
        [--reached | --file NAME ...] [--chip NAME] [--jobs N]
        [--keep FOLDER] [--report FILE]

FOLDER holds the checkout ``op-plugin``, whose branch for torch_npu 2.5.1.post1
is 7.1.0. Every file runs in a separate process, on the chip for which most of
op-plugin's tests are written (A2): tests skip themselves on any other chip, and
those for A3 on this one.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

# The branches for torch_npu 2.5.1.post1 and for 2.10.0.post4.
CHECKOUT, CHECKOUT_2026 = "op-plugin", "op-plugin-26.1.0"
TESTS = Path("test", "test_custom_ops")
LIMIT_S = 300
CHIP, A3 = "Ascend910B3", "Ascend910_9391"
# A test that needs more ranks than there are dies returns silently and counts as passed.
DIES = 16
REACHED = Path(__file__).with_name("reached_operators.json")
# Operators with which tests of other operators prepare their inputs.
PREPARING = {"npu_format_cast"}
_CALL = re.compile(r"(?:torch_npu|torch_npu\.atb|torch\.ops\.\w+)\.(\w+)\(")


@dataclass(frozen=True)
class Outcome:
    """Results of one test file; `failed` and `skipped` map test names to reasons."""

    file: str
    passed: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def state(self) -> str:
        if self.failed:
            return "failed"
        return "passed" if self.passed else "skipped"


def files(folder: Path, names: Iterable[str] = (), checkout: str = CHECKOUT) -> list[Path]:
    """Return the test files of the checkout in `folder`, or those with the given names."""
    wanted = set(names)
    return [path for path in sorted((folder / checkout / TESTS).glob("test_*.py")) if not wanted or path.name in wanted]


def reached(folder: Path, chip: str = CHIP) -> list[str]:
    """Return the names of a chip's test files that call an operator which the pinned code bases reach."""
    of_a3 = {path.name for path in files(folder) if f"SupportedDevices(['{A3[:10]}'])" in path.read_text()}
    return [path.name for path in files(folder) if calls_reached(path) and (path.name in of_a3) == (chip == A3)]


def calls_reached(test: Path, reached: Collection[str] | None = None) -> bool:
    """Return whether a test file calls an operator of torch_npu that the pinned code bases reach.

    `reached` are full names of operators; None stands for those that the pins of 2025 reach.
    """
    names = json.loads(REACHED.read_text())["reached"] if reached is None else reached
    operators = {name.rpartition("::")[2] for name in names} - PREPARING
    return not operators.isdisjoint(_CALL.findall(test.read_text()))


def share(outcomes: Iterable[Outcome]) -> tuple[int, int]:
    """Return how many tests passed, and how many ran; tests that skip themselves do not count as run."""
    counted = [(outcome.passed, len(outcome.failed)) for outcome in outcomes]
    return sum(passed for passed, _ in counted), sum(passed + failed for passed, failed in counted)


def run(
    folder: Path,
    names: Iterable[str] = (),
    jobs: int = 1,
    chip: str = CHIP,
    keep: Path | None = None,
    checkout: str = CHECKOUT,
    limit: float = LIMIT_S,
) -> list[Outcome]:
    """Run the files of op-plugin's checkout in `folder`, `jobs` at a time, on a chip.

    The real torch_npu's queue is off, since a rejection in it would end all later work of a file. Strict mode is on:
    the tests follow the documents, and show where these are wrong. `keep` is a folder for the outcome of each file; a
    file that has one there is not run again. A file is ended after `limit` seconds.
    """
    settings = {
        "NPU_EMULATOR_STRICT": "1",
        "TASK_QUEUE_ENABLE": "0",
        "NPU_EMULATOR_CHIP": chip,
        "NPU_EMULATOR_CAPACITY_MB": str(64 << 10),
        "NPU_EMULATOR_NODE": f"op-plugin-{os.getpid()}",
        "NPU_EMULATOR_DEVICES": str(DIES),
        "OMP_NUM_THREADS": "1",
    }
    tests = files(folder, names, checkout)
    with tempfile.TemporaryDirectory() as scratch:
        results = keep or Path(scratch)
        results.mkdir(parents=True, exist_ok=True)
        waiting = [test for test in tests if not (results / f"{test.stem}.json").exists()]
        program = [sys.executable, "-W", "ignore", "-m", "tests.upstream.op_plugin_program"]
        subprocess.run([*program, results, str(jobs), str(limit), *waiting], env=os.environ | settings, check=True)
        return [Outcome(test.name, **json.loads((results / f"{test.stem}.json").read_text())) for test in tests]


def _line(outcome: Outcome) -> str:
    counts = f"{outcome.passed} passed, {len(outcome.failed)} failed, {len(outcome.skipped)} skipped"
    reasons = sorted({*outcome.failed.values()} or {*outcome.skipped.values()})
    return f"{outcome.state:8} {outcome.file:55} {counts}{'; ' if reasons else ''}{' | '.join(reasons)[:240]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upstream", type=Path, required=True, metavar="FOLDER")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--file", nargs="*", default=(), metavar="NAME", help="only these files")
    chosen.add_argument("--reached", action="store_true", help="only files of operators that our stack reaches")
    parser.add_argument("--chip", choices=(CHIP, A3), default=CHIP)
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep the outcome of every file, and go on where a run on this chip stopped",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write all outcomes as JSON")
    options = parser.parse_args()
    if not (options.upstream / CHECKOUT / TESTS).is_dir():
        parser.error(f"{options.upstream} lacks {Path(CHECKOUT, TESTS)}")
    names = reached(options.upstream, options.chip) if options.reached else options.file
    outcomes = run(options.upstream, names, options.jobs, options.chip, options.keep)
    for outcome in outcomes:
        print(_line(outcome))
    passed, ran = share(outcomes)
    print(f"{passed} of {ran} tests that ran passed ({passed / max(ran, 1):.1%})")
    for state in ("passed", "failed", "skipped"):
        print(f"{sum(outcome.state == state for outcome in outcomes)} files {state}")
    if options.report:
        options.report.write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1))


if __name__ == "__main__":
    main()
