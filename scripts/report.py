#!/usr/bin/env python3
"""Write report.html of a run: curves, memory, collectives, samples and the configuration in one file.

For two runs, write comparison.html: curves of both, and the differences of their steps with 95 % intervals.

The page needs neither a server nor a network; it can be mailed. To see a run while it trains, use scripts/watch.sh.

Examples:
    python scripts/report.py outputs/rehearsal/latest
    python scripts/report.py RUN OTHER --output comparison.html

Exit codes: 0 done; 2 a folder is not a run, or the page cannot be written.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from post_training.command_parser import CommandParser  # noqa: E402
from post_training.report import ReportError  # noqa: E402
from post_training.report.comparison import write_comparison  # noqa: E402
from post_training.report.run_page import write_page  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Write the page, print its path, and return the exit code."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="output folder of a run")
    parser.add_argument("other", metavar="RUN", type=Path, nargs="?", help="a second run, to compare with the first")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write (default: report.html in the run's folder, comparison.html in the second's)",
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
        print(f"error: {error.filename} cannot be written ({error.strerror}). Set --output", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
