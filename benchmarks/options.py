"""What the command lines of the benchmarks share: one sentence for a bad value, and figures as JSON in a file."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and ends with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n")


def make_parser(description: str | None) -> Parser:
    """A parser with `--json FILE`."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write the figures there too, as JSON")
    return parser


def whole(lowest: int) -> Callable[[str], int]:
    """The type of an option that takes a whole number from `lowest` on."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {lowest} on")
        return int(text)

    return parse


def positive(text: str) -> float:
    """The type of an option that takes a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def writable_file(text: str) -> Path:
    """The type of an option that names a file to write, looked at before anything is measured."""
    path = Path(text)
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is no file that can be written")
    return path


def write_figures(path: Path | None, figures: Any) -> None:
    """Write the figures where `--json` asks for them."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"wrote {path}", file=sys.stderr)
