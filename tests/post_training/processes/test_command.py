"""Running a command without leftover processes: after a normal exit, an interrupt, or the launcher's own death."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from post_training.processes import command as processes

ROOT = Path(__file__).resolve().parents[3]
LAUNCHER = """
import sys
from pathlib import Path
from post_training.processes import command as processes
# Whoever waits for what has happened already waits longer than any test; what is left is not waited for long.
processes._GRACE_S, processes._REMAINING_GRACE_S = 600, 0.2
folder = Path(sys.argv[1])
with processes.SignalFlag() as signals:
    try:
        command = [sys.executable, "-c", (folder / "command.py").read_text(), str(folder)]
        status = processes.run_to_the_end(command, {"ADDED": "here"}, folder, folder / "logs" / "run.log", signals)
    except processes.Interrupted as interrupted:
        status = f"interrupted {interrupted}"
print(status, processes.descendants(processes.os.getpid()))
"""
# Leaves an orphan in its own session that ignores SIGTERM and SIGINT, like a crashed daemon.
LEAVE_DAEMON = """
import os, signal, sys, time
folder = sys.argv[1]
os.mkfifo(folder + "/ready")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        open(folder + "/daemon", "w").write(str(os.getpid()))
        open(folder + "/ready", "w").close()
        time.sleep(600)
    os._exit(0)
open(folder + "/ready").close()
os.unlink(folder + "/ready")
"""
# Records, for each process asked to end after the command, whether the command has cleaned up. It can do so only while
# the launcher waits for it.
RECORDING_LAUNCHER = LAUNCHER.replace(
    "folder = Path(sys.argv[1])\n",
    """folder, send, wait_until = Path(sys.argv[1]), processes.send, processes.wait_until
def record(process, number):
    with open(folder / "asked", "a") as asked:
        print((folder / "cleaned").exists(), file=asked)
    return send(process, number)
def wait(*arguments):
    processes.wait_until = wait_until
    (folder / "proceed").write_text("")
    return wait_until(*arguments)
processes.send, processes.wait_until = record, wait
""",
)
CLEAN_UP_AT_SIGTERM = """
def clean_up(*_):
    open(folder + "/cleaned", "w").close()
    raise SystemExit(3)
signal.signal(signal.SIGTERM, clean_up)
os.mkfifo(folder + "/running")
open(folder + "/running", "w").close()
time.sleep(600)
"""


class Launched:
    """Launcher process whose command runs the given source."""

    def __init__(self, folder, source, launcher=LAUNCHER):
        self.folder = folder
        (folder / "command.py").write_text(source)
        self.process = subprocess.Popen(
            [sys.executable, "-c", launcher, folder],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            # Under `nohup` the tests ignore SIGHUP, and the launcher would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def wait_until_running(self):
        deadline = time.monotonic() + 60
        while not (self.folder / "running").exists():
            assert time.monotonic() < deadline and self.process.poll() is None
        (self.folder / "running").read_text()

    def result(self):
        return self.process.communicate(timeout=600)[0].strip()

    def daemon_runs(self):
        return is_running(int((self.folder / "daemon").read_text()))


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_status_log_environment_and_folder(tmp_path):
    launched = Launched(tmp_path, "import os; print('said', os.environ['ADDED'], os.getcwd(), flush=True); os._exit(7)")
    assert launched.result() == "7 []"
    assert (tmp_path / "logs" / "run.log").read_text() == f"said here {tmp_path}\n"


def test_leftovers_of_a_finished_command_are_ended(tmp_path):
    launched = Launched(tmp_path, LEAVE_DAEMON)
    assert launched.result() == "0 []"
    assert not launched.daemon_runs()


def test_what_ran_before_the_command_is_left_alone(tmp_path):
    before = "import subprocess, sys\nearlier = subprocess.Popen(['sleep', '600'])\n"
    after = "\nearlier.kill()\nprint('ended by us', earlier.wait())\n"
    (tmp_path / "command.py").write_text(LEAVE_DAEMON)
    launcher = subprocess.run(
        [sys.executable, "-c", before + LAUNCHER + after, tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    earlier = launcher.stdout.splitlines()[0].removeprefix("0 [").removesuffix("]")
    assert earlier.isdigit() and launcher.stdout.splitlines()[1:] == ["ended by us -9"]
    assert not is_running(int((tmp_path / "daemon").read_text()))


def test_without_the_launcher_the_daemon_would_stay(tmp_path):
    command = subprocess.run([sys.executable, "-c", LEAVE_DAEMON, tmp_path])
    daemon = int((tmp_path / "daemon").read_text())
    assert command.returncode == 0 and is_running(daemon)
    os.kill(daemon, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_interrupt_lets_the_command_clean_up_and_ends_the_rest(tmp_path, number):
    launched = Launched(tmp_path, LEAVE_DAEMON + CLEAN_UP_AT_SIGTERM)
    launched.wait_until_running()
    assert launched.daemon_runs()
    launched.process.send_signal(number)
    assert launched.result() == f"interrupted {signal.Signals(number).name} []"
    assert (tmp_path / "cleaned").exists() and not launched.daemon_runs()


@pytest.mark.parametrize("kept", [True, False])
def test_nohup_lets_a_run_outlive_its_terminal(kept):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN if kept else signal.SIG_DFL)
    try:
        with processes.SignalFlag() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received == ([] if kept else [signal.SIGHUP])
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_command_cleans_up_before_anything_else_of_it_is_ended(tmp_path):
    os.mkfifo(tmp_path / "proceed")
    held = CLEAN_UP_AT_SIGTERM.replace("(*_):\n", "(*_):\n    open(folder + '/proceed').close()\n")
    launched = Launched(tmp_path, LEAVE_DAEMON + held, RECORDING_LAUNCHER)
    launched.wait_until_running()
    launched.process.send_signal(signal.SIGTERM)
    assert launched.result() == "interrupted SIGTERM []"
    assert set((tmp_path / "asked").read_text().split()) == {"True"}


def test_second_interrupt_does_not_wait(tmp_path):
    deaf = LEAVE_DAEMON + CLEAN_UP_AT_SIGTERM.replace("raise SystemExit(3)", "time.sleep(600)")
    launched = Launched(tmp_path, deaf)
    launched.wait_until_running()
    launched.process.send_signal(signal.SIGINT)
    while not (tmp_path / "cleaned").exists():
        assert launched.process.poll() is None
    launched.process.send_signal(signal.SIGINT)
    assert launched.result() == "interrupted SIGINT []"
    assert not launched.daemon_runs()


def test_command_is_asked_to_end_when_the_launcher_is_killed(tmp_path):
    launched = Launched(tmp_path, "import os, signal, sys, time; folder = sys.argv[1]\n" + CLEAN_UP_AT_SIGTERM)
    launched.wait_until_running()
    launched.process.kill()
    launched.process.communicate()
    deadline = time.monotonic() + 60
    while not (tmp_path / "cleaned").exists():
        assert time.monotonic() < deadline, "the command outlived its launcher"
