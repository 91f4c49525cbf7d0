"""The parser of every command: help texts of at most 80 columns, and the same placeholders in all of them."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from itertools import groupby
from typing import Any

from post_training.overrides import with_absolute_path

_WIDTH = 80
# By the name of the type: `whole` and `finite` of arguments.py make a function for each range.
_PLACEHOLDERS = {"int": "N", "whole number": "N", "float": "X", "number": "X"}


class HelpFormatter(argparse.HelpFormatter):
    """Reflows paragraphs to the terminal, up to 80 columns, and keeps indented lines, such as examples, as they are."""

    def __init__(self, prog: str, **options: Any) -> None:
        # argparse leaves the last two columns of the terminal free.
        super().__init__(prog, **{"width": min(shutil.get_terminal_size().columns, _WIDTH) - 2} | options)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(_filled(each, width, indent) for each in re.split(r"\n\s*\n", text.strip("\n")))

    def _split_lines(self, text: str, width: int) -> list[str]:
        # Names such as bit-for-bit and --no-scaled-down-job stay in one piece.
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        known = _PLACEHOLDERS.get(getattr(action.type, "__name__", ""))
        return known or super()._get_default_metavar_for_optional(action)


class CommandParser(argparse.ArgumentParser):
    """A parser with `HelpFormatter`, for a module's docstring as its description.

    The placeholder of a number follows from its type. Give `metavar` for every other value: FILE, DIR, RUN, NAME, SIZE,
    SECONDS, KEY=VALUE; tests/scripts/test_help_texts.py lists them all.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": HelpFormatter} | options)

    def add_overrides(self, words: str) -> None:
        """Add Hydra overrides at the end of the line, with `words` as their help.

        Relative paths in them count from the current folder: what a command starts runs in another one.
        """
        self.add_argument("overrides", nargs="*", type=with_absolute_path, metavar="KEY=VALUE", help=words)


def _filled(paragraph: str, width: int, indent: str) -> str:
    parts = []
    for indented, lines in groupby(paragraph.splitlines(), key=lambda line: line.startswith(" ")):
        if indented:
            parts += [indent + line for line in lines]
        else:
            parts.append(
                textwrap.fill(
                    " ".join(lines), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
                )
            )
    return "\n".join(parts)
