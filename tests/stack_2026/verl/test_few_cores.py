"""How processes wait for each other in the rehearsal: over vLLM's own sockets, and in verl's own replay buffer."""

import asyncio
import gc
import importlib
import pickle
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import zmq
from hydra import compose, initialize_config_module
from ray import cloudpickle
from verl.models.mcore import model_forward
from verl.models.mcore import util as padding
from verl.trainer.ppo.v1 import agent_loop_tq, replay_buffer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.engine import core
from vllm_ascend.patch.platform import patch_shm_broadcast

from rehearsal.stack_2026.plan import Options, make_plan
from verl_plugin.resume import replay_buffer as ordered

UPSTREAM = shm_broadcast.SpinCondition
UPSTREAM_TQ = {name: getattr(agent_loop_tq, name) for name in ("tq", "list_of_dict_to_tensordict")}
UNFREEZE = gc.unfreeze
MESSAGES, LONGEST_MS = 200, 2000
PROMPTS = 32


@pytest.fixture
def few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import few_cores; its changes are undone after the test."""
    monkeypatch.setattr(shm_broadcast, "SpinCondition", UPSTREAM)
    monkeypatch.setattr(patch_shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS", 5000)
    for name, value in UPSTREAM_TQ.items():
        monkeypatch.setattr(agent_loop_tq, name, value)
    monkeypatch.setattr(model_forward, "preprocess_bshd_engine", padding.preprocess_bshd_engine)
    monkeypatch.setattr(gc, "unfreeze", gc.unfreeze)
    monkeypatch.delitem(sys.modules, "rehearsal.stack_2026.few_cores", raising=False)
    importlib.import_module("rehearsal.stack_2026.few_cores")


@pytest.fixture
def condition(few_cores: None) -> type[shm_broadcast.SpinCondition]:
    """The condition class that vLLM uses after the import."""
    return shm_broadcast.SpinCondition


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


def test_verls_worker_reaches_another_process(few_cores, monkeypatch):
    """Pickle the worker as Ray does: by value, with its globals, since no module has the class under its name."""
    worker = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    assert b"_queue_of_process" in cloudpickle.dumps(worker)
    assert cloudpickle.loads(cloudpickle.dumps(agent_loop_tq.tq)) is agent_loop_tq.tq is not UPSTREAM_TQ["tq"]
    monkeypatch.setattr(agent_loop_tq, "tq", SimpleNamespace(**vars(UPSTREAM_TQ["tq"])))
    with pytest.raises((pickle.PicklingError, TypeError)):
        cloudpickle.dumps(worker)


def pair(kind: type, context: zmq.Context, folder) -> tuple:
    """Make a writer, and a reader that has subscribed to it."""
    address = f"ipc://{folder}/notify"
    writer = kind(is_reader=False, context=context, notify_address=address)
    reader = kind(is_reader=True, context=context, notify_address=address)
    while not reader.poller.poll(10):
        writer.notify()
    reader.local_notify_socket.recv()
    return writer, reader


def test_every_message_wakes_its_reader(condition, context, tmp_path):
    """Write each message as soon as the reader has the last one; upstream's condition loses about every third."""
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


class Queue:
    """A stand-in for TransferQueue, which records its requests; one that contains the key `refused` fails."""

    def __init__(self, refused: str = "") -> None:
        self.requests: list[list[str]] = []
        self.answers: dict[str, tuple[list[int], dict[str, Any]]] = {}
        self.refused = refused

    async def async_kv_batch_put(self, keys: list[str], partition_id: str, fields: Any, tags: list[dict]) -> None:
        assert len(fields) == len(keys) == len(tags)
        self.requests.append(keys)
        await asyncio.sleep(0)
        if self.refused in keys:
            raise ValueError(self.refused)
        for place, key in enumerate(keys):
            self.answers[f"{partition_id} {key}"] = (fields["responses"][place].tolist(), tags[place])


def put_at_once(queue: Queue, lengths: list[int], partitions: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put answers concurrently, as verl's agent loops do when they end. Return each call's result or exception."""
    monkeypatch.setattr(agent_loop_tq, "tq", queue)
    monkeypatch.setattr(agent_loop_tq, "list_of_dict_to_tensordict", UPSTREAM_TQ["list_of_dict_to_tensordict"])
    monkeypatch.delitem(sys.modules, "rehearsal.stack_2026.few_cores", raising=False)
    importlib.import_module("rehearsal.stack_2026.few_cores")

    async def put(number: int, length: int, partition: str) -> None:
        field = {"responses": torch.arange(length), "uid": f"u{number}"}
        await agent_loop_tq.tq.async_kv_batch_put(
            keys=[f"k{number}"],
            fields=agent_loop_tq.list_of_dict_to_tensordict([field]),
            tags=[{"number": number}],
            partition_id=partition,
        )
        assert f"{partition} k{number}" in queue.answers, "returned before TransferQueue had it"

    async def all_of_them() -> list[Any]:
        calls = [put(number, *each) for number, each in enumerate(zip(lengths, partitions, strict=True))]
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(all_of_them())


def test_answers_go_together_and_arrive_whole(few_cores, monkeypatch):
    lengths, partitions = [3, 5, 5, 2, 4], ["train", "train", "val", "train", "val"]
    queue = Queue()
    assert put_at_once(queue, lengths, partitions, monkeypatch) == [None] * 5
    assert queue.requests == [["k0"], ["k1", "k3"], ["k2", "k4"]]
    assert queue.answers == {
        f"{partition} k{number}": (list(range(length)), {"number": number})
        for number, (length, partition) in enumerate(zip(lengths, partitions, strict=True))
    }


def test_failed_request_fails_its_answers_alone(few_cores, monkeypatch):
    found = put_at_once(Queue(refused="k1"), [2] * 4, ["train", "train", "train", "val"], monkeypatch)
    assert [type(each) for each in found] == [type(None), ValueError, ValueError, type(None)]


@pytest.mark.parametrize("shape", [(), (3, 2)])
@pytest.mark.parametrize("named", [{}, {"need_roll": True}, {"forced_max_seqlen": 11}])
def test_padded_samples_are_those_of_verl(few_cores, monkeypatch, shape, named):
    one_rank = {
        "get_context_parallel_world_size": lambda: 1,
        "get_context_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
    }
    monkeypatch.setattr(padding, "mpu", SimpleNamespace(**one_rank))
    rows = [torch.randint(1, 99, (length, *shape)) for length in (4, 9, 1, 7)]
    samples = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    found = model_forward.preprocess_bshd_engine(samples, pre_process=True, **named)
    expected = padding.preprocess_bshd_engine(samples, pre_process=True, **named)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    asked: list[int] = []
    monkeypatch.setattr(torch.Tensor, "unbind", lambda tensor: asked.append(len(rows)) or [row + 1 for row in rows])
    assert not torch.equal(model_forward.preprocess_bshd_engine(samples, **named)[0], expected[0])
    assert asked == [len(rows)], "each sample is looked up again"


def status_of_prompts(status: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return TransferQueue's listing: all prompts with this status, and their answers if it is "finished"."""
    prompts: dict[str, dict[str, Any]] = {
        f"p{number}": {"is_prompt": True, "global_steps": 1, "status": status, ordered.ORDER: number}
        for number in range(PROMPTS)
    }
    answers = {f"{prompt}_0_0": {"seq_len": 12} for prompt in prompts} if status == "finished" else {}
    return {"train": prompts | answers}


def test_trainer_sees_a_complete_batch_at_once(tmp_path, monkeypatch):
    """Let verl's trainer build its buffer from the rehearsal's keys; upstream's default polls every two seconds."""
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


def test_engine_that_ends_leaves_imports_frozen(few_cores, monkeypatch):
    monkeypatch.setattr(core, "cleanup_dist_env_and_memory", lambda: None)
    gc.freeze()
    try:
        core.EngineCore.shutdown(mock.MagicMock())
        assert gc.get_freeze_count() > 0
        monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
        core.EngineCore.shutdown(mock.MagicMock())
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
