#!/usr/bin/env python3
"""Print the recipe's own table for runs, on any machine, beside the published rows and their conditions.

Seconds by stage with the reshard apart from the rollout, tokens per second of a card and of a die, MFU, lengths. The
metrics are means of all steps but the first, which also compiles. Tokens per second of the system are given twice: of
whole steps, and of steps without saving and validation. verl's own perf/throughput is of a die, and its perf/mfu/actor
is 0 on an A3.

Example:
    python scripts/summarise.py outputs/rehearsal/latest

Exit codes: 0 done; 2 a folder is not a run, or has no completed step.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from post_training.arguments import finite  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.report import ReportError  # noqa: E402
from post_training.report.flops import A3_PEAKS, PEAK  # noqa: E402
from post_training.report.published import ROWS  # noqa: E402
from post_training.report.recipe_table import column_of_published, column_of_run, render  # noqa: E402
from post_training.report.run_folder import read_run  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Print the table and return the exit code."""
    known = "; ".join(f"{peak.teraflops:g}: {peak.source}" for peak in A3_PEAKS)
    parser = CommandParser(description=__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="output folder of a run")
    parser.add_argument("--step", type=int, help="only this step; the published rows are of one step")
    parser.add_argument("--model", type=Path, metavar="FILE", help="the model's config.json, for runs without one")
    parser.add_argument(
        "--peak",
        type=finite(above=0),
        help=f"TFLOPS of a die for dense BF16 (default: {PEAK.teraflops:g}); of an A3 {known}",
    )
    parser.add_argument("--json", action="store_true", help="print the columns as JSON")
    options = parser.parse_args(arguments)
    peak = options.peak or PEAK.teraflops
    source = next((each.source for each in A3_PEAKS if each.teraflops == peak), "as given")
    try:
        runs = [read_run(folder, options.step, options.model) for folder in options.runs]
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    columns = [*(column_of_run(run, peak) for run in runs), *(column_of_published(row, peak) for row in ROWS)]
    print(
        json.dumps([column.as_dict() for column in columns], indent=1)
        if options.json
        else render(columns, peak, source)
    )
    return 0


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
