"""Plant mutants in a copy of the tree, and print the share that the tests kill.

The mutants are those of the lists in tests/mutations/planted, some of these with --choose, or drawn at random with
--sample.

Example:
    python -m tests.mutations --only reshard --near
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

from rich.console import Console
from rich.table import Table

from post_training.command_parser import CommandParser
from post_training.processes.command import Interrupted, SignalFlag
from tests.mutations.drawn import draw
from tests.mutations.fault import ROOT, Fault, FaultError, read_list
from tests.mutations.selection import of_other_stack
from tests.mutations.workbench import OTHER_ENVIRONMENT, Outcome, Verdict, Workbench

RESULTS = ROOT / "outputs" / "mutations"
LIST_SHARE, SAMPLE_SHARE = 1.0, 0.9
DONE, MISSED, REJECTED, SIGNALLED = 0, 1, 2, 128


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--sample", type=int, help="draw N mutants instead of planting those of the list")
    parser.add_argument("--choose", type=int, help="plant N mutants of the list, chosen by --seed")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw or choice (default: 1)")
    parser.add_argument("--only", metavar="TEXT", help="only mutants whose name or file contains TEXT")
    parser.add_argument(
        "--limit", type=float, default=3600, metavar="SECONDS", help="limit of one run of tests (default: 3600)"
    )
    parser.add_argument("--part", metavar="N/N", help="K/N: every N-th mutant from the K-th on, to share the work")
    parser.add_argument(
        "--near",
        action="store_true",
        help="run only the nearest tests of each mutant: quick, a lower bound",
    )
    parser.add_argument("--show", action="store_true", help="print the mutants and their tests; plant none")
    values = parser.parse_args(arguments)
    for option in ("sample", "choose"):
        number = getattr(values, option)
        if number is not None and number < 1:
            parser.error(f"--{option} is {number}: give a number of faults from 1 on")
    if None not in (values.sample, values.choose):
        parser.error("--sample draws other faults than those of the list: give it or --choose")
    return values


def choose(faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """Choose some faults, in list order; later additions to the list change the choice little."""
    by_hash = sorted(faults, key=lambda fault: sha256(f"{seed} {fault.name}".encode()).digest())
    chosen = set(by_hash[:count])
    return [fault for fault in faults if fault in chosen]


def chosen_faults(values: argparse.Namespace) -> list[Fault]:
    """Return the faults that the command line selects.

    Raises:
        FaultError: the list is unusable, or no fault is selected.
    """
    faults = read_list() if values.sample is None else draw(values.sample, values.seed)
    if values.choose is not None:
        faults = choose(faults, values.choose, values.seed)
    if values.only is not None:
        faults = [fault for fault in faults if values.only in fault.name or values.only in fault.file]
    if values.part is not None:
        part, _, parts = values.part.partition("/")
        if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
            raise FaultError(f"--part is {values.part}: give it as K/N with K from 1 to N, such as 1/2.")
        faults = faults[int(part) - 1 :: int(parts)]
    if values.near:
        faults = [replace(fault, tiers=fault.tiers[:1]) for fault in faults]
    if not faults:
        raise FaultError(f"No fault is left with --only {values.only}: give a text that a name or a file holds.")
    return faults


class Results:
    """Verdicts of earlier runs on the same source and tests, as JSON lines, so that an interrupted run can resume.

    A change to a test file, or to a program in its folder, invalidates the verdicts that relied on it. After a change
    to how several product files work together, delete the results file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._verdicts: dict[str, Verdict] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                key = entry.pop("key")
                self._verdicts[key] = Verdict(Outcome(entry["outcome"]), tuple(entry["by"]), entry["seconds"])

    def get(self, fault: Fault) -> Verdict | None:
        """Return the verdict on a fault, unless the fault or one of its tests has changed since."""
        return self._verdicts.get(self._key(fault))

    def add(self, fault: Fault, verdict: Verdict) -> None:
        """Save a verdict."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"key": self._key(fault), "name": fault.name, **asdict(verdict)}) + "\n")

    def _key(self, fault: Fault) -> str:
        digest = sha256(f"{fault.file}\n{fault.source}\n{fault.tiers}".encode())
        for selector in sorted({selector.partition("::")[0] for tier in fault.tiers for selector in tier}):
            path = ROOT / selector
            beside = (program for program in path.parent.glob("*.py") if not program.name.startswith("test_"))
            for test in sorted(path.rglob("*.py")) if path.is_dir() else (path, *sorted(beside)):
                digest.update(test.read_bytes())
        return digest.hexdigest()


def try_all(console: Console, faults: Sequence[Fault], limit_s: float) -> dict[Fault, Verdict]:
    """Try every fault, showing one line each; known verdicts are reused.

    At the end, all tests that killed a mutant are run on the unchanged tree.

    Raises:
        FaultError: one of those tests fails there too, or needs a stack that is not set up.
    """
    needed = [fault for fault in faults if any(of_other_stack(tier) for tier in fault.tiers)]
    if needed and not (ROOT / OTHER_ENVIRONMENT).exists():
        raise FaultError(
            f'The tests of "{needed[0].name}" need {OTHER_ENVIRONMENT}/. Run bash scripts/test.sh --stack 2026 first.'
        )
    results, verdicts = Results(RESULTS / "verdicts.jsonl"), {}
    with SignalFlag() as signals, Workbench(signals, limit_s) as bench:
        for number, fault in enumerate(faults, 1):
            verdict = results.get(fault)
            if verdict is None:
                verdict = bench.try_fault(fault)
                results.add(fault, verdict)
            verdicts[fault] = verdict
            line = f"{number:4d}/{len(faults)} {verdict.outcome:<9}{verdict.seconds:6.0f} s  {fault.name}"
            style = "" if verdict.outcome.counts_as_noticed else "bold red"
            console.print(line, *verdict.by, style=style, highlight=False, soft_wrap=True, markup=False)
        noticed_by = sorted({test for verdict in verdicts.values() for test in verdict.by})
        if noticed_by:
            bench.require_green(noticed_by)
    return verdicts


def print_shares(console: Console, verdicts: dict[Fault, Verdict]) -> float:
    """Print the share of killed mutants by area, and return the overall share."""
    by_area: dict[str, list[bool]] = defaultdict(list)
    for fault, verdict in verdicts.items():
        by_area[fault.area].append(verdict.outcome.counts_as_noticed)
    table = Table("area", "noticed", "planted", "share")
    rows = sorted(by_area.items())
    everything = [noticed for area in by_area.values() for noticed in area]
    for area, noticed in (*rows, ("all", everything)):
        table.add_row(area, str(sum(noticed)), str(len(noticed)), f"{sum(noticed) / len(noticed):.0%}")
    console.print(table)
    return sum(everything) / len(everything)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    values, console = parse_arguments(arguments), Console()
    try:
        faults = chosen_faults(values)
        if values.show:
            for fault in faults:
                console.print(fault.name, *(" ".join(tier) for tier in fault.tiers), sep="\n    ", soft_wrap=True)
            return DONE
        verdicts = try_all(console, faults, values.limit)
    except FaultError as error:
        print(f"error: {error}", file=sys.stderr)
        return REJECTED
    except Interrupted as interrupted:
        print(f"{interrupted}: verdicts so far are kept; the same command goes on from there.", file=sys.stderr)
        return SIGNALLED + interrupted.number
    share, wanted = print_shares(console, verdicts), LIST_SHARE if values.sample is None else SAMPLE_SHARE
    if share < wanted:
        print(f"error: {share:.1%} of the faults were noticed; at least {wanted:.0%} must be.", file=sys.stderr)
        return MISSED
    return DONE


if __name__ == "__main__":
    sys.exit(main())
