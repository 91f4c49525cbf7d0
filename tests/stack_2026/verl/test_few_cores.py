"""How readers and writers of vLLM's shared memory wait for each other in the rehearsal, over vLLM's own sockets."""

import importlib
import sys
from collections.abc import Iterator

import pytest
import zmq
from vllm.distributed.device_communicators import shm_broadcast
from vllm_ascend.patch.platform import patch_shm_broadcast

UPSTREAM = shm_broadcast.SpinCondition
MESSAGES, LONGEST_MS = 200, 2000


@pytest.fixture
def condition(monkeypatch: pytest.MonkeyPatch) -> type[shm_broadcast.SpinCondition]:
    """What vLLM makes after the import, which is undone after the test."""
    monkeypatch.setattr(shm_broadcast, "SpinCondition", UPSTREAM)
    monkeypatch.setattr(patch_shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS", 5000)
    monkeypatch.delitem(sys.modules, "rehearsal.stack_2026.few_cores", raising=False)
    importlib.import_module("rehearsal.stack_2026.few_cores")
    return shm_broadcast.SpinCondition


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


def pair(kind: type, context: zmq.Context, folder) -> tuple:
    """A writer and a reader that has subscribed to it."""
    address = f"ipc://{folder}/notify"
    writer = kind(is_reader=False, context=context, notify_address=address)
    reader = kind(is_reader=True, context=context, notify_address=address)
    while not reader.poller.poll(10):
        writer.notify()
    reader.local_notify_socket.recv()
    return writer, reader


def test_every_message_wakes_its_reader(condition, context, tmp_path):
    """A writer whose next message follows at once, as a reader's answer does; upstream's loses about every third."""
    writer, reader = pair(condition, context, tmp_path)
    while reader.poller.poll(100):
        reader.local_notify_socket.recv()
    for number in range(MESSAGES):
        writer.notify()
        assert reader.poller.poll(LONGEST_MS), f"message {number} is lost"
        reader.local_notify_socket.recv()


def test_reader_sleeps_at_once_after_a_message(condition, context, tmp_path, monkeypatch):
    writer, reader = pair(condition, context, tmp_path)
    asked: list[int | None] = []
    monkeypatch.setattr(reader.poller, "poll", lambda timeout: asked.append(timeout) or [])
    reader.record_read()
    reader.wait(timeout_ms=7)
    assert asked == [7]


def test_reader_looks_again_soon_after_a_lost_start(condition):
    assert patch_shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS == 500
