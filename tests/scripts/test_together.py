"""scripts/lib/together.sh: Ctrl-C ends its command in the background too."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from post_training.processes.descendants import runs, wait_until

TOGETHER = Path(__file__).parents[2] / "scripts" / "lib" / "together.sh"
SECONDS_ALLOWED = 120


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGTERM])
def test_signal_to_the_group_ends_both_commands(tmp_path, number):
    commands = [["bash", "-c", f"echo $$ >{tmp_path}/{name}; exec sleep 600"] for name in ("first", "second")]
    process = subprocess.Popen(
        ["bash", TOGETHER, *commands[0], "--and", *commands[1], "--then", "true"],
        start_new_session=True,
        # A shell cannot trap signals that were ignored when it started, as these may be here.
        preexec_fn=lambda: [signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGQUIT)],
    )
    files = [tmp_path / name for name in ("first", "second")]
    assert wait_until(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files), SECONDS_ALLOWED)
    os.killpg(process.pid, number)
    assert process.wait(SECONDS_ALLOWED) == (-number if number == signal.SIGTERM else 128 + number)
    assert wait_until(lambda: not any(runs(int(file.read_text())) for file in files), SECONDS_ALLOWED)
