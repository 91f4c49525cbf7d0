"""Every program under scripts/, as it is started: it prints its usage, and rejects unknown options."""

import argparse
import json
import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

# Required arguments of each program; every other program starts without arguments.
REQUIRED = {
    "check_data.py": "FILE",
    "convert_ckpt_deepseek3.py": "--load-dir, --save-dir",
    "evaluate.py": "--model, --data",
    "fp8_cast_bf16.py": "--input-fp8-hf-path, --output-bf16-hf-path",
    "json_to_parquet.py": "--json_path, --output_dir",
    "make_arithmetic_data.py": "--output",
    "make_training_config.py": "FILE, --output",
    "make_quick_start_files.py": "--home",
    "make_tiny_checkpoint.py": "--output",
    "plan.py": "--config-name, --model",
    "preflight.py": "--config-name",
    "prove_resume.py": "--config-name",
    "replay.py": "DIR",
    "replay_hang.py": "RUN",
    "report.py": "RUN",
    "reshard_plan.py": "--train, --rollout",
    "serve.py": "--model",
    "summarise.py": "RUN",
    "verify_ckpt.py": "LEFT, RIGHT",
}
FOLDER = Path(__file__).resolve().parents[2] / "scripts"
SCRIPTS = sorted(FOLDER.glob("[!_]*.py"))


@pytest.fixture
def start(monkeypatch, capsys):
    """Return a function that starts a script with arguments and returns its exit code, output and error output."""

    def run(script: Path, *arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        # evaluate.py sets variables for its imports.
        with mock.patch.dict(os.environ), pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_says_how_it_is_used(start, script):
    code, output, error = start(script, "--help")
    assert code == 0 and output.startswith(f"usage: {script.name}") and not error


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_rejects_an_option_that_it_does_not_know(start, script):
    code, output, error = start(script, "--no-such-option")
    assert code == 2 and error and not output


@pytest.mark.parametrize(
    "program",
    sorted(each for each in FOLDER.rglob("*.py") if "sys.path.insert(" in each.read_text()),
    ids=lambda each: each.name,
)
def test_a_program_finds_the_packages_of_its_own_checkout(program):
    """Programs are started by path, from anywhere. In this process imported modules would hide a wrong path."""
    ((place, added),) = re.findall(r"^sys\.path\.insert\((.*?), (.*)\)$", program.read_text(), re.MULTILINE)
    (root,) = re.findall(r"^ROOT = (.*)$", program.read_text(), re.MULTILINE) or [None]
    names = {"Path": Path, "__file__": str(program)}
    assert eval(added, names | {"ROOT": root and eval(root, names)}) == str(FOLDER.parent)
    assert int(place) == 0, "before what is installed"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_names_all_that_it_lacks(start, script):
    _, _, error = start(script, "--no-such-option")
    named = re.search(r"the following arguments are required: (.*)", error)
    assert (named and named[1]) == REQUIRED.get(script.name)


@pytest.fixture
def defaults(start, monkeypatch):
    """Return a function that gives a script's options with a string or number as default, switches excluded."""

    def found(script: Path) -> list[argparse.Action]:
        parsers = []

        def parse_known_args(parser, *_, **__):
            parsers.append(parser)
            parser.exit()

        with monkeypatch.context() as patched:
            patched.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
            start(script)
        taken = (each for each in parsers[0]._actions if isinstance(each.default, str | int | float))
        return [each for each in taken if each.option_strings and each.nargs != 0]

    return found


def test_defaults_are_those_that_users_know(defaults):
    """Changing a default changes commands that users have written down, so it must be listed in defaults.json and in
    CHANGELOG.md. Defaults inside this checkout and ones that follow from the number of processors are left out."""
    found = {}
    for script in SCRIPTS:
        of_one = {each.option_strings[-1]: each.default for each in defaults(script) if each.dest != "workers"}
        found[script.name] = {name: value for name, value in of_one.items() if str(FOLDER.parent) not in str(value)}
    known = json.loads((Path(__file__).parent / "defaults.json").read_text())
    assert {name: of_one for name, of_one in found.items() if of_one} == known


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_help_says_every_default(defaults, script):
    """Paths are described in words instead."""
    for action in defaults(script):
        said = (action.help or "") % (vars(action) | {"prog": script.name})
        value = action.default if isinstance(action.default, str) else f"{action.default:g}"
        assert "/" in value or f"{value} (default)" in said or value in said.partition("default")[2], said
