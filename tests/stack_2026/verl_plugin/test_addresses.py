"""Jobs of two Rays on one machine have the same job ID, but share no socket for weights."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, get_rollout_class
from verl.workers.rollout.vllm_rollout import ServerAdapter
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from post_training.layouts.layout import RolloutPlacement
from verl_plugin.alltoallv import worker
from verl_plugin.alltoallv.adapter import OwnSocketAdapter
from verl_plugin.alltoallv.addresses import control_path, register_adapter
from verl_plugin.alltoallv.control import Control, Description, Hello
from verl_plugin.alltoallv.settings import EXTENSION, AlltoallvSettings
from verl_plugin.alltoallv.worker import AlltoallvExtension

FIRST_JOB = "01000000"
OF_VERL = f"ipc:///tmp/rl-colocate-zmq-{FIRST_JOB}-replica-0-rank-0.sock"
WORKER: Any = SimpleNamespace(
    local_rank=0,
    model_runner=SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=0,
        data_parallel_size=1, data_parallel_size_local=1, tensor_parallel_size=1))),
)  # fmt: skip


def adapter_of(monkeypatch, extension: str | None) -> OwnSocketAdapter:
    """Build the adapter on a training rank of the first job, without its servers."""

    def begin(self: Any, config: Any) -> None:
        self.config, self.zmq_handle = config, OF_VERL

    monkeypatch.setattr(ServerAdapter, "__init__", begin)
    vllm = {} if extension is None else {"worker_extension_cls": extension}
    return OwnSocketAdapter(SimpleNamespace(engine_kwargs={"vllm": vllm}))


def handle_of_worker(monkeypatch) -> str:
    monkeypatch.setenv("VERL_RAY_JOB_ID", FIRST_JOB)
    extension = object.__new__(AlltoallvExtension)
    vars(extension).update(vars(WORKER))
    return extension._get_zmq_handle()


@pytest.mark.parametrize("raylet", ["4711", "4712", None])
def test_both_ends_of_a_job_find_each_other_and_no_other_jobs(monkeypatch, raylet):
    handles, paths = set(), set()
    for own in (raylet, "4713"):
        monkeypatch.delenv("RAY_RAYLET_PID", raising=False)
        if own is not None:
            monkeypatch.setenv("RAY_RAYLET_PID", own)
        handle = adapter_of(monkeypatch, EXTENSION).zmq_handle
        assert handle == handle_of_worker(monkeypatch)
        assert len(handle) < 100, "a path of a socket has 107 characters at most"
        handles.add(handle)
        paths.add(control_path(FIRST_JOB, 0))
    assert len(handles) == len(paths) == 2
    monkeypatch.setenv("VERL_REPLICA_RANK", "0")
    assert vLLMColocateWorkerExtension._get_zmq_handle(WORKER) == OF_VERL, "control: upstream's are the same"


def test_upstreams_worker_is_sent_weights_where_it_waits(monkeypatch):
    monkeypatch.setenv("RAY_RAYLET_PID", "4711")
    assert adapter_of(monkeypatch, None).zmq_handle == OF_VERL


def test_verl_builds_the_adapter(monkeypatch):
    monkeypatch.setitem(_ROLLOUT_REGISTRY, ("vllm", "async"), "verl.workers.rollout.vllm_rollout.ServerAdapter")
    register_adapter()
    assert get_rollout_class("vllm") is OwnSocketAdapter


@pytest.mark.parametrize("greeted", [False, True])
def test_worker_also_receives_from_training_without_engines_unless_its_own_has_come(tmp_path, monkeypatch, greeted):
    monkeypatch.setattr(worker, "STRANGER_SECONDS", 0.0)
    monkeypatch.setattr(worker, "_POLL_MILLISECONDS", 20)
    description = Description({}, RolloutPlacement(1), AlltoallvSettings())
    control = Control(tmp_path / "control.sock", description)
    if greeted:
        control._answer(Hello(os.getpid()))
    sender, context = f"ipc://{tmp_path}/verl.sock", zmq.Context.instance()
    with context.socket(zmq.REQ) as training, context.socket(zmq.REP) as receiver:
        training.bind(sender)
        receiver.connect(f"ipc://{tmp_path}/own.sock")
        left = iter(range(20))

        def check() -> None:
            """Send as soon as somebody receives; give up after 20 looks."""
            next(left)
            if training.poll(0, zmq.POLLOUT):
                training.send_pyobj("whole tensors")

        monkeypatch.setattr(control, "check", check)
        socket = worker._WatchfulSocket(receiver, control, sender)
        if greeted:
            with pytest.raises(StopIteration):
                socket.recv_pyobj()
        else:
            assert socket.recv_pyobj() == "whole tensors"
