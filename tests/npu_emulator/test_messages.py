"""A message that is sent is received, also when its sender has ended; and nothing is left of either."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.npu_emulator.engine_process import finish, start

pytestmark = pytest.mark.slow
SHARED_MEMORY = "/dev/shm/"


def received_from_one_that(ending: str, folder: Path) -> object:
    """Return the message that rank 1 received after rank 0 had ended this way."""
    node, gate = f"{os.environ['NPU_EMULATOR_NODE']}-{ending}", folder / "gate"
    os.mkfifo(gate)
    results = [folder / "0.json", folder / "1.json"]
    variables = {"NPU_EMULATOR_NODE": node, "TASK_QUEUE_ENABLE": "0"}
    sender, receiver = (
        start("message_program", rank, folder / "store", results[rank], gate, ending, **variables) for rank in range(2)
    )
    try:
        output, _ = sender.communicate(timeout=300)
        # The client of a fork reports a signal as a shell does: 128 plus its number.
        killed = (-signal.SIGKILL, 128 + signal.SIGKILL)
        assert sender.returncode in (killed if ending == "killed" else (0,)), output
        with gate.open("r+b", buffering=0) as opened:  # which does not wait for somebody who reads
            opened.write(b"\n")
            finish(receiver)
    finally:
        receiver.kill()
    mapped = json.loads(results[0].read_text())
    # The control: there is a file of the node while a rank lives, and memory that ranks share has no name.
    assert any(name.startswith(SHARED_MEMORY) and name.endswith(node) for name in mapped), mapped
    assert [name for name in mapped if "hccl" in name and not name.endswith(".so")] == [
        "/memfd:npu_emulator_hccl (deleted)"
    ]
    assert not [name for name in os.listdir(SHARED_MEMORY) if node in name or "hccl" in name]
    return json.loads(results[1].read_text())


@pytest.mark.parametrize("ending", ["returns", "destroys", "killed"])
def test_a_message_is_there_when_its_sender_has_ended(tmp_path, ending):
    assert received_from_one_that(ending, tmp_path) is True


def test_one_that_sent_nothing_is_named(tmp_path):
    answer = received_from_one_that("silent", tmp_path)
    assert "HcclRecv on rank 1 of 2: no answer after" in answer
    assert answer.endswith("from rank 0 (its process has ended, last in HcclRecv)")
