"""The reward process: the documented lines that it writes, and its exit at the end of its input."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def worker():
    process = subprocess.Popen(
        [sys.executable, "-m", "post_training.rewards.worker"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_every_line_is_as_documented_and_the_input_ends_it(worker):
    def answered(truth: str, answer: str) -> dict[str, bool]:
        worker.stdin.write(json.dumps({"truth": truth, "answer": answer}).encode() + b"\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())

    assert json.loads(worker.stdout.readline()) == {"ready": True}
    assert answered(r"\frac12", "0.5") == {"equal": True} and answered("1", "2") == {"equal": False}
    assert answered("16t", "16") == {"equal": False}, "a letter is no unit that is taken off"
    os.kill(worker.pid, signal.SIGINT)
    assert answered("x", "x") == {"equal": True}, "its parent decides when it ends"
    os.kill(worker.pid, signal.SIGUSR1)
    assert [json.loads(worker.stdout.readline()) for _ in range(2)] == [{"killed": True}, {"ready": True}]
    assert answered("{1,2}", "{2,1}") == {"equal": True}
    worker.stdin.close()
    assert worker.wait(timeout=600) == 0 and worker.stdout.read() == b""
