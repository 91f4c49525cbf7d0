"""Options and exit codes that the weight tools' command lines share."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from post_training.arguments import whole
from post_training.checkpoint.checksums import read_checksums
from post_training.checkpoint.conversion import Conversion, run
from post_training.interrupts import acknowledged

INTERRUPTED = 130


def add_workers_option(parser: argparse.ArgumentParser) -> None:
    """Add --workers."""
    parser.add_argument(
        "--workers",
        type=whole(1),
        default=len(os.sched_getaffinity(0)),
        help="parallel processes (default: one per core, %(default)s)",
    )


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add --workers and --source-checksums."""
    add_workers_option(parser)
    parser.add_argument(
        "--source-checksums",
        type=Path,
        metavar="FILE",
        help="SHA-256 of the source files as sha256sum prints them, checked first",
    )


def known_checksums(options: argparse.Namespace) -> dict[str, str]:
    """Return the content of --source-checksums."""
    return read_checksums(options.source_checksums) if options.source_checksums else {}


def run_tool(options: argparse.Namespace, plan: Callable[[argparse.Namespace], Conversion]) -> int:
    """Plan and run a conversion, and return the exit status: 0 done, 2 rejected, 130 interrupted."""
    begun = time.monotonic()
    try:
        with acknowledged("interrupted; stopping the workers, keeping finished files"):
            summary = run(plan(options), options.workers, lambda line: print(line, flush=True))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; run the same command again to resume", file=sys.stderr)
        return INTERRUPTED
    kept = f", {summary.kept} verified from an earlier run" if summary.kept else ""
    print(
        f"complete: {summary.written} files ({summary.written_bytes} bytes) written{kept}, "
        f"{time.monotonic() - begun:.1f} s"
    )
    return 0
