"""Code shared by the benchmarks' command lines: one sentence for a bad value, and results as JSON in a file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from post_training.command_parser import CommandParser


class Parser(CommandParser):
    """Reports an error in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n")


def make_parser(description: str | None) -> Parser:
    """Return a parser with the option `--json FILE`."""
    parser = Parser(description=description)
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write the metrics as JSON too")
    return parser


def writable_file(text: str) -> Path:
    """Parse an option that names a file to write; the file is checked before anything is measured."""
    path = Path(text)
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is not a writable file")
    return path


def write_results(path: Path | None, results: Any) -> None:
    """Write the results to the file that `--json` names."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(f"wrote {path}", file=sys.stderr)
