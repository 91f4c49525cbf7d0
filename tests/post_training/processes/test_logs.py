"""Reading the end of a command's log."""

import subprocess
import sys

import pytest

from post_training.processes.logs import last_error, last_words
from post_training.recovery.causes import classify


def test_last_error_of_a_log(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("noise\nerror: first\nerror: the cause; the remedy\n(pid) more noise\n")
    assert last_error(log) == "the cause; the remedy"
    log.write_text("one\nlast line\n\n")
    assert last_error(log) == "last line"
    log.write_text("")
    assert last_error(log) == "it printed nothing"


def test_a_crash_of_python_is_named(tmp_path):
    """The crash is found although Python prints the list of extension modules last."""
    log = tmp_path / "run.log"
    program = "import ctypes, faulthandler, numpy; faulthandler.enable(); print('step 12'); ctypes.string_at(0)"
    with log.open("w") as file:
        subprocess.run([sys.executable, "-u", "-c", program], stdout=file, stderr=subprocess.STDOUT, check=False)
    assert "\nExtension modules: numpy." in log.read_text()
    assert last_error(log) == "Fatal Python error: Segmentation fault"
    assert classify(1, "", log.read_text()).sentence == "Fatal Python error: Segmentation fault"


UNKNOWN = "[ERROR] 2026-11-30-04:07:44 (PID:1277, Device:-1, RankID:-1) ERR99999 UNKNOWN applicaiton exception"


@pytest.mark.parametrize(
    ("printed", "expected"),
    [(f"Exception: 47 weights differ\n{UNKNOWN}\n", "Exception: 47 weights differ"), (UNKNOWN, UNKNOWN)],
)
def test_unknown_error_of_torch_npu_hides_no_exception(printed, expected):
    assert last_words(printed) == expected
