"""Sleep mode on the published torch_npu, whose task queue lags behind Python."""

import signal

import pytest

from tests.npu_emulator.engine_process import finish, start

pytestmark = pytest.mark.exhaustive


def test_weights_that_are_still_written_are_kept_as_they_become():
    assert finish(start("sleep_program", "patched")).splitlines()[-1] == "kept"


def test_control_without_the_patch_they_are_kept_as_they_were_or_the_process_ends():
    process = start("sleep_program")
    output, _ = process.communicate(timeout=600)
    ended = "killed" if process.returncode == -signal.SIGSEGV else output.splitlines()[-1]
    assert ended in ("killed", "changed"), output
