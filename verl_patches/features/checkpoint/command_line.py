"""What the weight tools' command lines have in common."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from verl_patches.features.checkpoint.checksums import read_checksums
from verl_patches.features.checkpoint.conversion import Conversion, run
from verl_patches.features.reshard.files import CheckpointError

INTERRUPTED = 130


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add --workers and --source-checksums."""
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes that write files (default: one for each core, %(default)s)",
    )
    parser.add_argument(
        "--source-checksums",
        type=Path,
        metavar="FILE",
        help="SHA-256 of the source files, one `digest  name` a line as sha256sum prints it; checked before anything",
    )


def known_checksums(options: argparse.Namespace) -> dict[str, str]:
    """The content of --source-checksums."""
    return read_checksums(options.source_checksums) if options.source_checksums else {}


def run_tool(options: argparse.Namespace, plan: Callable[[argparse.Namespace], Conversion]) -> int:
    """Plan and run a conversion, and return the exit status: 0 done, 2 refused, 130 interrupted."""
    begun = time.monotonic()
    try:
        if options.workers < 1:
            raise CheckpointError(f"--workers {options.workers}: at least one is needed")
        summary = run(plan(options), options.workers, lambda line: print(line, flush=True))
    except (ValueError, KeyError, OSError) as error:
        print(f"error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        return INTERRUPTED
    kept = f", {summary.kept} verified from an earlier run" if summary.kept else ""
    print(
        f"complete: {summary.written} files ({summary.written_bytes} bytes) written{kept}, "
        f"{time.monotonic() - begun:.1f} s"
    )
    return 0
