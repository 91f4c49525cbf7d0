"""How processes wait for each other in the rehearsal: over vLLM's own sockets, and in verl's own buffer of answers."""

import importlib
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from hydra import compose, initialize_config_module
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from vllm.distributed.device_communicators import shm_broadcast
from vllm_ascend.patch.platform import patch_shm_broadcast

from rehearsal.stack_2026.plan import Options, make_plan
from verl_plugin.resume import replay_buffer as ordered

UPSTREAM = shm_broadcast.SpinCondition
MESSAGES, LONGEST_MS = 200, 2000
PROMPTS = 32


@pytest.fixture
def few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The changes of the import, which are undone after the test."""
    monkeypatch.setattr(shm_broadcast, "SpinCondition", UPSTREAM)
    monkeypatch.setattr(patch_shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS", 5000)
    monkeypatch.delitem(sys.modules, "rehearsal.stack_2026.few_cores", raising=False)
    importlib.import_module("rehearsal.stack_2026.few_cores")


@pytest.fixture
def condition(few_cores: None) -> type[shm_broadcast.SpinCondition]:
    """What vLLM makes after the import."""
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


def status_of_prompts(status: str) -> dict[str, dict[str, dict[str, Any]]]:
    """What TransferQueue lists: prompts, and the answers of those that are finished."""
    prompts: dict[str, dict[str, Any]] = {
        f"p{number}": {"is_prompt": True, "global_steps": 1, "status": status, ordered.ORDER: number}
        for number in range(PROMPTS)
    }
    answers = {f"{prompt}_0_0": {"seq_len": 12} for prompt in prompts} if status == "finished" else {}
    return {"train": prompts | answers}


def test_trainer_sees_a_complete_batch_at_once(tmp_path, monkeypatch):
    """verl's trainer builds its buffer from the rehearsal's own keys; upstream's sleeps two seconds for each look."""
    plan = make_plan(Options(output=tmp_path), "now")
    given = [word for word in plan.overrides() if not word.startswith(("--config", "hydra."))]
    trainer = object.__new__(PPOTrainerSync)
    with initialize_config_module("verl.trainer.config", version_base=None):
        trainer.config = compose("ppo_megatron_trainer", overrides=given)
    trainer.trainer_mode = "sync"
    listed = iter([status_of_prompts("running"), status_of_prompts("running"), status_of_prompts("finished")])
    slept: list[float] = []
    done = status_of_prompts("finished")
    queue = SimpleNamespace(kv_list=lambda *names: done if names else next(listed), kv_clear=lambda **_: None)
    for module in (replay_buffer, ordered):
        monkeypatch.setattr(module, "tq", queue)
    monkeypatch.setattr(replay_buffer, "time", SimpleNamespace(time=time.time, sleep=slept.append))
    buffer = trainer._build_replay_buffer()
    batch, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=PROMPTS)
    assert len(batch.keys) == PROMPTS and slept == [0.1, 0.1]
    assert isinstance(buffer, ordered.OrderedReplayBuffer)
