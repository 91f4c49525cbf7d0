"""Column and file names are printed with their control characters escaped."""

import subprocess
import sys
from io import StringIO
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from post_training.terminal import EscapingStream, escaped

ROOT = Path(__file__).resolve().parents[2]
CLEAR = "\x1b[2J\x1b]0;title\x07"
# These print no names that come from a user or a file.
WITHOUT_NAMES = {"make_arithmetic_data.py", "make_tiny_checkpoint.py"}


@pytest.mark.parametrize(
    "text, shown",
    [
        ("prompt", "prompt"),
        ("答案 é 🙂\tx\ny", "答案 é 🙂\tx\ny"),
        (f"a{CLEAR}b", r"a\x1b[2J\x1b]0;title\x07b"),
        ("over\rwritten\x08", r"over\rwritten\x08"),
        ("\x9b31m", r"\x9b31m"),
        ("safe\u202egnp.exe", r"safe\u202egnp.exe"),
        ("not \udcff utf-8", r"not \udcff utf-8"),
    ],
)
def test_control_characters_escaped(text, shown):
    assert escaped(text) == shown


def test_progress_bar_may_return_the_carriage():
    written = StringIO()
    print("\r 50%\x1b[0m", end="", file=EscapingStream(written))
    assert written.getvalue() == "\r 50%\\x1b[0m"


def run(script, *arguments):
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=600, check=False)


def test_column_and_file_names_escaped_by_data_tools(tmp_path):
    file = tmp_path / f"rows{CLEAR}.parquet"
    pyarrow.parquet.write_table(pyarrow.table({f"prompt{CLEAR}": ["1+1"], "data_source": ["x"]}), file)
    for script, arguments in (("check_data.py", [file]), ("json_to_parquet.py", ["--json_path", file])):
        more = ["--output_dir", tmp_path / "out"] if script == "json_to_parquet.py" else []
        done = run(script, *arguments, *more)
        said = done.stdout + done.stderr
        assert done.returncode != 0 and b"\\x1b[2J" in said and b"\x1b" not in said and b"\x07" not in said


def test_wrong_argument_escaped():
    done = run("report.py", "run", f"--{CLEAR}")
    assert done.returncode == 2 and b"\\x1b[2J" in done.stderr and b"\x1b" not in done.stderr


def test_every_tool_escapes_its_output():
    tools = [file for file in (ROOT / "scripts").glob("[!_]*.py") if file.name not in WITHOUT_NAMES]
    assert len(tools) > 15
    assert [file.name for file in tools if "\n    escape_output(" not in file.read_text()] == []


def test_shell_scripts_escape_what_they_print(tmp_path):
    line = f'source "{ROOT}/scripts/lib/terminal.sh"; say "é 答 $1"; fail "$1 is no folder"'
    done = subprocess.run(["bash", "-c", line, "-", f"a{CLEAR}\tb"], capture_output=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stdout.decode() == "é 答 a?[2J?]0;title?\tb\n"
    assert done.stderr == b"error: a?[2J?]0;title?\tb is no folder\n"
