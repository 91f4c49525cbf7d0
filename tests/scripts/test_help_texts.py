"""Every --help has at most 80 columns, an example that the command accepts, and the same placeholders as the others."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from overlay import cli
from post_training.command_parser import CommandParser
from rehearsal import __main__ as rehearsal
from tests import help_texts
from tests.mutations import __main__ as mutations
from verl_patches.trainer import main_ppo, verl_command

ROOT = Path(__file__).resolve().parents[2]
SHELL = sorted((ROOT / "scripts").glob("*.sh"))


def program(path):
    """Return the function that starts a script by its path, as `python scripts/NAME` does."""

    def start(words):
        with mock.patch.object(sys, "argv", [str(path), *words]), mock.patch.object(sys, "path", list(sys.path)):
            runpy.run_path(str(path), run_name="__main__")

    return start


def emulator(words):
    with mock.patch.object(sys, "argv", ["npu_emulator", *words]):
        runpy.run_module("npu_emulator", run_name="__main__")


COMMANDS = {f"python scripts/{path.name}": program(path) for path in sorted((ROOT / "scripts").glob("[!_]*.py"))} | {
    f"python benchmarks/{path.name}": program(path)
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if "make_parser(__doc__)" in path.read_text()
}
COMMANDS |= {
    "bash scripts/rehearse.sh": rehearsal.parse_arguments,
    "python -m npu_emulator": emulator,
    "python -m overlay": cli.main,
    "python -m tests.mutations": mutations.parse_arguments,
    "python -m verl_patches.trainer.main_ppo": main_ppo.main,
    "python3 -m verl.trainer.main_ppo": verl_command.main,
}
by_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: Path(command.split()[-1]).name)


@pytest.fixture(autouse=True)
def same_environment():
    """Some commands set variables for their imports."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def parsers():
    found = {}

    def parser(command):
        if command not in found:
            found[command] = help_texts.parser_of(lambda: COMMANDS[command]([]))
        return found[command]

    return parser


@by_command
@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_help_fits_80_columns(parsers, command, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    for parser in help_texts.with_commands(parsers(command)):
        assert not help_texts.too_wide(parser.format_help())


@by_command
def test_example_is_accepted(parsers, command):
    for parser in help_texts.with_commands(parsers(command)):
        examples = help_texts.examples(parser.format_help())
        assert examples, parser.prog
        for words in examples:
            arguments = help_texts.rest_of(words, command.split())
            help_texts.accept(lambda arguments=arguments: COMMANDS[command](arguments))


@by_command
def test_placeholders_are_agreed(parsers, command):
    for parser in help_texts.with_commands(parsers(command)):
        assert not help_texts.unknown_placeholders(parser)


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_help_has_known_options_and_placeholders(path):
    text = subprocess.run(["bash", path, "--help"], capture_output=True, text=True, check=True).stdout
    assert not help_texts.too_wide(text)
    rows = [line.strip().split("  ")[0].split() for line in text.splitlines() if line.startswith("  --")]
    options = {word.rstrip(",") for row in rows for word in row if word.startswith("-")}
    placeholders = [word for row in rows for word in row if not word.startswith("-")]
    assert [word for word in placeholders if not help_texts.agreed(word.rstrip("."))] == []
    examples = help_texts.examples(text)
    assert examples
    for words in examples:
        assert words[0] == "bash" and (ROOT / words[1]).is_file()
        own = words[: words.index("--")] if "--" in words else words
        assert {word for word in own if word.startswith("--")} <= options


def test_too_wide_help_is_noticed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    parser = CommandParser(prog="x", description=f"Example:\n    x {'--verbose ' * 8}")
    assert len(help_texts.too_wide(parser.format_help())) == 1


def test_rejected_example_is_noticed(capsys):
    with pytest.raises(SystemExit):
        help_texts.accept(lambda: COMMANDS["python scripts/doctor.py"](["--no-such-option"]))
    assert "unrecognized arguments" in capsys.readouterr().err


def test_unknown_placeholder_is_noticed():
    parser = CommandParser()
    parser.add_argument("--num-layers", help="no type, so argparse takes the option's name")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--model", metavar="[NAME=]FOLDER")
    assert help_texts.unknown_placeholders(parser) == ["NUM_LAYERS", "[NAME=]FOLDER"]
