"""Checks of help texts: at most 80 columns, examples that the command accepts, and consistent placeholders."""

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

WIDTH = 80
# N is an integer and X any other number; LAYOUT is reshard_plan.py's; the lower-case ones are literal.
PLACEHOLDERS = frozenset(
    "N X FILE DIR RUN CHECKPOINT OUT LEFT RIGHT NAME TEXT SIZE SECONDS HOST PORT KEY VALUE COMMAND COMMIT LAYOUT "
    "rollout training".split()
)


class Parsed(BaseException):
    """Raised once a command has parsed its arguments, to stop it there."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def parser_of(start: Callable[[], object]) -> argparse.ArgumentParser:
    """Return a command's parser, whatever its arguments are."""
    return _started(start, lambda _: None)


def accept(start: Callable[[], object]) -> None:
    """Run a command until its parser has accepted the arguments; raise SystemExit if it rejects them."""
    _started(start, lambda parse: parse())


def _started(start: Callable[[], object], first: Callable[[Callable[[], object]], object]) -> argparse.ArgumentParser:
    def replaced(original: Callable[..., object]) -> Callable[..., object]:
        def parse(parser, arguments=None, namespace=None):
            first(lambda: original(parser, arguments, namespace))
            raise Parsed(parser)

        return parse

    of = argparse.ArgumentParser
    methods = {name: replaced(getattr(of, name)) for name in ("parse_args", "parse_intermixed_args")}
    with mock.patch.multiple(of, **methods):
        try:
            start()
        except Parsed as parsed:
            return parsed.parser
    raise AssertionError("the command parsed nothing")


def with_commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from with_commands(each)


def too_wide(text: str) -> list[str]:
    """Return the lines of more than 80 columns."""
    return [line for line in text.splitlines() if len(line) > WIDTH]


def examples(text: str) -> list[list[str]]:
    """Return the words of every command line under a line that begins with "Example"."""
    blocks = re.findall(r"^Examples?\b.*(?:\n\S.*)*\n((?: +.*\n?)+)", text, re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(command) for line in lines for command in line.split("&&")]


def unknown_placeholders(parser: argparse.ArgumentParser) -> list[str]:
    """Return the placeholders in a parser's help that are not in the agreed list."""
    formatter = parser._get_formatter()
    shown = [
        formatter._metavar_formatter(
            each,
            formatter._get_default_metavar_for_optional(each)
            if each.option_strings
            else formatter._get_default_metavar_for_positional(each),
        )(1)
        for each in parser._actions
        if each.nargs != 0 and each.help != argparse.SUPPRESS
    ]
    texts = [text for each in shown for text in each]
    return [text for text in texts if not text.startswith("{") and not agreed(text)]


def agreed(text: str) -> bool:
    """Return whether every part of a placeholder such as [NAME=]DIR is in the agreed list."""
    parts = re.findall(r"\w+", text)
    return bool(parts) and PLACEHOLDERS.issuperset(parts)


def rest_of(words: Sequence[str], program: Sequence[str]) -> list[str]:
    """Return the arguments of a command line, which must start with `program`."""
    assert list(words[: len(program)]) == list(program), words
    return list(words[len(program) :])
