"""The heartbeats that a process sends."""

import os
import queue
import sys
import threading
from types import SimpleNamespace

import pytest

from post_training.hang_detection import signs
from post_training.hang_detection.signs import NO_PHASE, TRAINER, Sign, Signs, place, place_of, process_start


def test_phases_nest_and_every_change_and_progress_moves():
    own = Signs()
    seen = [own.now("0", 0, "here")]
    with own.phase("rollout"):
        seen.append(own.now("0", 1, "here"))
        with own.phase("reshard"):
            seen.append(own.now("0", 2, "here"))
        own.progress()
        seen.append(own.now("0", 3, "here"))
    seen.append(own.now("0", 4, "here"))
    assert [sign.phase for sign in seen] == [None, "rollout", "reshard", "rollout", None]
    assert [sign.moves for sign in seen] == [0, 1, 2, 4, 5]


def test_work_beside_the_main_thread_counts_in_its_phase():
    """Progress of a checkpoint's parts must not hide that the main thread hangs in a phase within or after it."""
    own, moves = Signs(), []

    def progress_of(name):
        before = own.now("0", 1, "").moves
        own.progress(name)
        moves.append(own.now("0", 1, "").moves - before)

    progress_of("checkpoint")
    with own.phase("checkpoint"):
        progress_of("checkpoint")
        progress_of(None)
        with own.phase("reshard"):
            progress_of("checkpoint")
            progress_of("reshard")
        progress_of("checkpoint")
    assert moves == [0, 1, 1, 0, 1, 1]


def test_a_phase_ends_with_an_exception():
    own = Signs()
    with pytest.raises(KeyError), own.phase("update"):
        raise KeyError
    assert own.now("0", 0, "").phase is None


def test_a_training_loop_that_waits_for_its_workers_is_in_no_phase():
    own = Signs()
    with own.phase("driver"):
        assert own.now(TRAINER, 0, "waits in ray.get").phase is None
        assert own.now(TRAINER, 0, "at ppo.py:3 in fit").phase == "driver"
        assert own.now("0", 0, "waits in ray.get").phase == "driver"


def test_a_sign_comes_back_as_it_was_sent():
    sign = Signs().now("3", 7, "at x.py:1 in f")
    assert Sign.unpacked(sign.packed()) == sign
    assert (sign.pid, sign.host) == (os.getpid(), os.uname().nodename)
    assert sign.started == process_start(os.getpid()) >= process_start(os.getppid()) >= 0


def frame(file, name, back=None, line=1):
    return SimpleNamespace(f_code=SimpleNamespace(co_filename=file, co_name=name), f_lineno=line, f_back=back)


C10D = "/site/torch/distributed/distributed_c10d.py"


def test_a_collective_is_named_as_it_was_called():
    caller = frame("/site/megatron/layers.py", "forward")
    collective = frame(C10D, "wrapper", frame(C10D, "all_reduce", frame(C10D, "wrapper", caller)))
    assert place(collective) == "waits in all_reduce"
    inside = frame("/site/torch_npu/hccl.py", "wait", collective)
    assert place(inside) == "waits in all_reduce"
    assert place(caller) == "at layers.py:1 in forward" and place(None) == "unknown"


@pytest.mark.parametrize(("beneath", "words"), [(7, "waits in all_reduce"), (8, "at hccl.py:1 in wait")])
def test_a_collective_is_looked_for_in_eight_frames(beneath, words):
    innermost = frame(C10D, "all_reduce")
    for _ in range(beneath):
        innermost = frame("/site/torch_npu/hccl.py", "wait", innermost)
    assert place(innermost) == words
    main = frame("/site/torch_npu/hccl.py", "wait")
    assert place_of({1: main, 2: innermost}, 1) == words


@pytest.mark.parametrize("name", ["get", "wait", "get_objects"])
def test_each_wait_of_ray_is_one_and_what_else_ray_does_is_none(name):
    assert place(frame("/site/ray/_private/worker.py", name)) == f"waits in ray.{name}"
    assert place(frame("/site/ray/worker.py", name)) == f"at worker.py:1 in {name}"
    assert place(frame("/site/ray/_private/worker.py", "put")) == "at worker.py:1 in put"


def test_without_a_main_thread_another_ones_collective_is_told():
    assert place_of({2: frame(C10D, "all_gather")}, None) == "waits in all_gather"
    assert place_of({}, None) == "unknown"


def test_ray_and_a_request_are_waits_too(tmp_path):
    assert place(frame("/site/ray/_private/worker.py", "get_objects")) == "waits in ray.get_objects"
    source = tmp_path / "p2p.py"
    source.write_text("request = send()\nrequest.wait()\n")
    assert place(frame(str(source), "exchange", line=2)) == "waits in p2p.py:2 in exchange"
    assert place(frame(str(source), "exchange", line=1)) == "at p2p.py:1 in exchange"


def test_a_collective_of_a_backward_pass_is_in_another_thread():
    main, other = frame("/site/torch/autograd/graph.py", "run_backward"), frame(C10D, "all_gather")
    assert place_of({1: main, 2: other, 3: frame("/site/queue.py", "get")}, 1) == "waits in all_gather"
    assert place_of({1: main}, 1) == "at graph.py:1 in run_backward"


def test_a_thread_of_its_own_sends_and_outlives_a_store_that_fails(own_context):
    own = own_context.of(Signs)
    sent: queue.Queue = queue.Queue()

    def send(name, content):
        sent.put((name, Sign.unpacked(content), threading.current_thread()))
        if sent.qsize() == 1:
            raise ConnectionError("the store is away")

    signs.start_sending("2", 0.001, send)
    received = [sent.get(timeout=30) for _ in range(3)]
    assert [sign.serial for _, sign, _ in received] == [0, 1, 2]
    assert {name for name, _, _ in received} == {"2"}
    assert {thread for _, _, thread in received} == {own.sender} != {threading.main_thread()}
    assert all(sign.where != "unknown" for _, sign, _ in received) and sys._getframe() is not None
    running = own.sender
    signs.start_sending("2", 0.001, send)
    assert own.sender is running


def test_without_ray_nothing_is_sent(own_context):
    signs.start_in_ray("0", 1.0)
    assert own_context.of(Signs).sender is None


def test_a_process_is_where_the_thread_of_its_phase_is():
    """An asyncio actor of Ray does not run its methods in the main thread."""
    signs, entered, over = Signs(), threading.Event(), threading.Event()

    def work_here():
        with signs.phase("update"):
            entered.set()
            over.wait()

    worker = threading.Thread(target=work_here)
    worker.start()
    entered.wait()
    assert signs.works_in == worker.ident
    assert "in work_here" in place_of({worker.ident: frame_of(worker, "work_here")}, signs.works_in)
    over.set()
    worker.join()


def frame_of(thread, name):
    frame = sys._current_frames()[thread.ident]
    while frame.f_code.co_name != name:
        frame = frame.f_back
    return frame


def test_a_process_may_be_in_no_phase():
    signs = Signs()
    with signs.phase("driver"), signs.phase(NO_PHASE):
        assert signs.now("3", 0, "").phase is None
    with signs.phase("driver"):
        assert signs.now("3", 0, "").phase == "driver"
