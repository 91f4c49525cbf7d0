"""Classification of failures, from logs that users published and from this project's own messages."""

import pytest

from post_training.recovery.causes import Failure, classify
from post_training.recovery.signs import CAUSES

# https://github.com/vllm-project/vllm-ascend/issues/486
SOCKET_TIMES_OUT = """[rank1]: RuntimeError: InnerRunOpApi:torch_npu/csrc/framework/OpParamMaker.cpp:281 OPS function \
error: HcclAllreduce, error code is 6
[rank1]: [ERROR] 2025-04-08-18:07:20 (PID:1292363, Device:1, RankID:1) ERR01100 OPS call acl api failed.
[rank1]: EI0006: [PID: 1292363] 2025-04-08-18:07:20.444.436 Getting socket times out. Reason: Remote Rank did not send \
the data in time. Please check the reason for the rank being stuck"""
# https://github.com/hiyouga/LlamaFactory/issues/3839
DIE_IN_USE = """RuntimeError: [ERROR] HCCL error in: torch_npu/csrc/distributed/ProcessGroupHCCL.cpp:64
[ERROR] 2024-05-21-11:57:54 (PID:927000, Device:3, RankID:3) ERR02200 DIST call hccl api failed.
EJ0001: 2024-05-21-11:57:54.167.645 Failed to initialize the HCCP process. Reason: Maybe the last training process is \
running."""
# https://github.com/verl-project/verl/issues/4921
ACTOR_DIED = """ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
        class_name: create_colocated_worker_cls.<locals>.WorkerDict
        pid: 87687
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed \
by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed unexpectedly \
due to SIGSEGV or another unexpected error."""
# https://github.com/vllm-project/vllm-ascend/issues/19
NPU_MEMORY = """RuntimeError: NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity; 10.24 \
GiB already allocated; 10.24 GiB current active; 19.52 MiB free; 10.65 GiB reserved in total by PyTorch)"""
BROKEN = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection reset by peer"
DIE_MEMORY = "NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity)"
DISK = "the disk that holds /data/run, mounted at /data, is full (no space left): make room there, or write elsewhere"
ENDED_BY_WATCH = "rank 3 (process 7 on a) has not answered for 61 s in update of step 3; the run was ended"
HANG = {"kind": "not_answering", "ended": True, "step": 3, "message": ENDED_BY_WATCH}
SLOW = HANG | {"ended": False}
UNREACHABLE = "ray.exceptions.ActorUnavailableError: The actor 8fa5 is unavailable: RpcError: Connection reset by peer"
# Ray 2.46, for a worker on a lost node.
NODE_DIED = """ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
        class_name: create_colocated_worker_cls.<locals>.WorkerDict
The actor died because its node has died. Node Id: 5c0d."""


@pytest.mark.parametrize(
    "code, sentence, log, faults, cause",
    [
        (1, "", SOCKET_TIMES_OUT, [], "network_error"),
        (1, "", DIE_IN_USE, [], "network_error"),
        (1, "", "OSError: [Errno 98] Address already in use", [], "network_error"),
        (4, "", "", [], "network_error"),
        (3, "", "", [], "network_error"),
        (1, ACTOR_DIED.splitlines()[-1], ACTOR_DIED, [], "worker_died"),
        (1, "", f"{ACTOR_DIED}\n{BROKEN}", [], "worker_died"),
        (1, "", BROKEN, [], "network_error"),
        (-9, "", "step:3", [], "worker_died"),
        (137, "", "", [], "worker_died"),
        (1, DIE_MEMORY, f"{NPU_MEMORY}\n{BROKEN}", [], "OOM"),
        (1, "", f"{NPU_MEMORY}\n{ACTOR_DIED}", [], "OOM"),
        (5, "", "", [], "ray_died"),
        (1, DISK, ACTOR_DIED, [], "full_disk"),
        (1, "OSError: [Errno 28] No space left on device", "", [], "full_disk"),
        (1, ENDED_BY_WATCH, ACTOR_DIED, [SLOW, HANG], "hang"),
        (1, ACTOR_DIED, ACTOR_DIED, [SLOW], "worker_died"),
        (1, UNREACHABLE, "", [], "worker_died"),
        (1, NODE_DIED.splitlines()[-1], f"{NODE_DIED}\n{BROKEN}", [], "ray_died"),
        (2, "data.train_files=x is no file", NPU_MEMORY, [], "bad_configuration"),
        (130, "interrupted", ACTOR_DIED, [], "interrupted"),
        (-15, "", "", [], "interrupted"),
        (143, "", "", [], "interrupted"),
        (-3, "", "", [], "interrupted"),
        (131, "", "", [], "interrupted"),
        (129, "", "", [], "interrupted"),
        (-7, "", "step:3", [], "host_memory"),
        (1, "KeyError: 'prompt'", "Traceback\nKeyError: 'prompt'", [], "unknown"),
    ],
)
def test_a_failure_has_one_cause(code, sentence, log, faults, cause):
    assert cause in CAUSES
    assert classify(code, sentence, log, faults).cause == cause


@pytest.mark.parametrize(
    "task, stage",
    [
        ("ray::WorkerDict.actor_rollout_generate_sequences()", "rollout"),
        ("ray::WorkerDict.actor_rollout_compute_log_prob()", "log_prob"),
        ("ray::WorkerDict.ref_compute_ref_log_prob()", "log_prob"),
        ("ray::WorkerDict.actor_rollout_update_actor()", "update"),
        ("ray::WorkerDict.actor_rollout_init_model()", None),
        ("", None),
    ],
)
def test_the_task_that_failed_last_says_in_which_stage(task, stage):
    earlier = "ray::WorkerDict.actor_rollout_generate_sequences() (pid=1, ip=127.0.0.1)\n" if stage else ""
    log = f"{earlier}{task} (pid=2, ip=127.0.0.1)\n{NPU_MEMORY}"
    assert classify(1, DIE_MEMORY, log) == Failure("OOM", DIE_MEMORY, stage)


@pytest.mark.parametrize("reason", CAUSES)
def test_reason_of_the_run_precedes_messages(reason):
    """The run's own reason wins, whatever else was printed and whatever the exit code."""
    found = classify(5, "step 2: the sandbox did not answer", f"{NPU_MEMORY}\n{ACTOR_DIED}", [HANG], reason)
    assert found == Failure(reason, "step 2: the sandbox did not answer")


def test_a_failure_without_a_sentence_has_the_last_line():
    assert classify(1, "", "one\ntwo \n\n").sentence == "two"
    assert classify(1, "", "").sentence == "it ended with exit status 1"
    assert classify(-9, "", "").sentence == "the command was ended by signal 9"
