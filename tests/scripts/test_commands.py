"""Every program under scripts/ as it is started: it says how it is used, and refuses what it does not know."""

import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

SCRIPTS = sorted((Path(__file__).resolve().parents[2] / "scripts").glob("*.py"))


@pytest.fixture
def start(monkeypatch, capsys):
    """Start a script with arguments: its exit code, output and error output."""

    def run(script: Path, *arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        # evaluate.py sets variables for what it imports.
        with mock.patch.dict(os.environ), pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_says_how_it_is_used(start, script):
    code, output, error = start(script, "--help")
    assert code == 0 and output.startswith(f"usage: {script.name}") and not error


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_refuses_an_option_that_it_does_not_know(start, script):
    code, output, error = start(script, "--no-such-option")
    assert code == 2 and error and not output
