#!/usr/bin/env python3
r"""Say which rank a hung run waits for, and replay its collectives.

Example:
    python scripts/replay_hang.py outputs/run

Ranks that make no progress write the collectives that they have called into RUN/calls, if the run records them. For
each rank this prints the last call that finished, the one it waits in, and who is missing there; then who is out of
step. The schedule is replayed with ranks that take turns at random, once for each seed, without a device. More in
docs/operations.md.

Exit codes: 0 no rank waits in a collective; 1 a hang was found; 2 the files cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from post_training.arguments import whole  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.hang_detection.calls import BUFFER, CALLS, CallsError, read_calls  # noqa: E402
from post_training.hang_detection.replay import Schedule, blame, named, replay, stopped_in_run  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402

_SHOWN_RANKS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the calls, find the cause, replay the schedule, and return the exit code."""
    options = parse_arguments(arguments)
    if not options.run.is_dir():
        print(f"error: {options.run} is not a folder. Pass the output folder of a run.", file=sys.stderr)
        return 2
    try:
        schedule = Schedule(read_calls(options.run))
    except CallsError as error:
        print(f"error: {error}.", file=sys.stderr)
        return 2
    found = blame(schedule)
    if found is None:
        print(f"No rank waits in a collective: {_why(schedule, options.run)}.")
        return 0
    print("\n".join(table(schedule)))
    print(f"\nCause: {found.cause}. {found.sentence[:1].upper()}{found.sentence[1:]}.")
    _replay(schedule, options)
    return 1


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="output folder of the run")
    parser.add_argument("--seeds", type=whole(1), default=3, metavar="N", help="replays (default: %(default)s)")
    parser.add_argument("--schedule", action="store_true", help="print the replay of seed 1, event by event")
    return parser.parse_args(arguments)


def table(schedule: Schedule) -> Iterator[str]:
    """Yield one line per rank, those that wait first."""
    newest = max(own.time for own in schedule.written.values())
    yield f"Calls of {len(schedule.written)} ranks, written until {datetime.fromtimestamp(newest):%Y-%m-%d %H:%M:%S}"
    waiting = schedule.waiting
    ranks = sorted(schedule.written, key=lambda rank: (rank not in waiting, rank))
    rows = [("rank", "last finished", "waits in", "missing there", "phase and place")]
    for rank in ranks[:_SHOWN_RANKS]:
        own, call = schedule.written[rank], waiting.get(rank)
        last = schedule.called(own.last_finished) if own.last_finished else "-"
        waits, place, missing = "-", own.where, "-"
        if call is not None:
            absent = schedule.missing((call.group, call.number))
            waits, place, missing = schedule.called(call), call.where, ", ".join(map(str, absent)) or "nobody"
        rows.append((str(rank), last, waits, missing, f"{own.phase or '-'}, {place}"))
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "".join(f"{word:{width}}" for word, width in zip(row, widths, strict=True)).rstrip()
    if len(ranks) > _SHOWN_RANKS:
        yield f"  and {len(ranks) - _SHOWN_RANKS} more"


def _replay(schedule: Schedule, options: argparse.Namespace) -> None:
    """Replay the schedule and print where the ranks stopped."""
    expected = stopped_in_run(schedule)
    made = {seed: replay(schedule, seed) for seed in range(1, options.seeds + 1)}
    if options.schedule:
        print("\nReplay with seed 1:")
        for rank, what, call in made[1].events:
            print(f"  rank {rank} {what} {schedule.called(call)}")
    other = [seed for seed, each in made.items() if dict(each.stopped) != expected]
    seeds = f"seeds 1 to {options.seeds}" if options.seeds > 1 else "seed 1"
    if not other:
        print(f"Replay with {seeds}: {named(expected)} stopped in the same calls each time.")
    else:
        print(f"Replay with {seeds}: seed {other[0]} stopped elsewhere; the calls alone do not explain the hang.")


def _why(schedule: Schedule, run: Path) -> str:
    if schedule.written:
        return f"{named(schedule.written)} finished all recorded calls"
    return f"{run / CALLS} has no file, so every rank made progress, or {BUFFER} was not set"


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
