#!/usr/bin/env python3
"""Writes report.html of a run: curves, memory, collectives, samples and the configuration in one file.

Of two runs it writes comparison.html: curves of both, and the differences of their steps with 95 % intervals.
The page needs neither a server nor a network; it can be mailed. A run that goes on has one too: `bash scripts/watch.sh`
shows it while it grows. Exit codes: 0 done, 2 a folder that is no run or a page that cannot be written.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from post_training.report import ReportError  # noqa: E402
from post_training.report.comparison import write_comparison  # noqa: E402
from post_training.report.run_page import write_page  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Writes the page and prints where it is; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="output folder of a run")
    parser.add_argument("other", metavar="OTHER", type=Path, nargs="?", help="a second run, to compare with the first")
    parser.add_argument(
        "--output",
        type=Path,
        help="the file to write (default: report.html in the run's folder, comparison.html in the second's)",
    )
    options = parser.parse_args(arguments)
    try:
        if options.other:
            print(write_comparison(options.run, options.other, options.output))
        else:
            print(write_page(options.run, options.output))
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename} cannot be written ({error.strerror}); give --output", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
