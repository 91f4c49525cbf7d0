"""The file of calls of a rank without progress: its content, when it is written and when it is removed."""

import json
import os

import pytest

from post_training.hang_detection.calls import CALLS, CallsError, CallsOfStalledRank, RankCalls, read_calls
from post_training.hang_detection.signs import Sign

AFTER_S = 10.0
# An entry in the form of torch_npu 2.10.0.post4: without a name, and `completed` before the call has finished.
ENTRY = {
    "frames": [
        {"name": "all_reduce", "filename": "/site-packages/torch/distributed/distributed_c10d.py", "line": 3007},
        {"name": "wrapper", "filename": "/site-packages/torch/distributed/c10d_logger.py", "line": 83},
        {"name": "step", "filename": "/home/me/train.py", "line": 24},
    ],
    "process_group": ["group_name_2", "undefined"],
    "collective_seq_id": 4,
    "profiling_name": "",
    "time_created_ns": 100,
    "input_sizes": [[4, 2]],
    "state": "completed",
    "time_discovered_completed_ns": 200,
    "retired": False,
    "is_p2p": False,
}
DUMP = {
    "pg_config": {"group_name_2": {"name": "group_name_2", "desc": "undefined", "ranks": "[0, 3]"}},
    "entries": [ENTRY | {"collective_seq_id": 3, "retired": True}, ENTRY, ENTRY | {"is_p2p": True}],
}


def sign(moves=0):
    return Sign("3", 1, moves, "update", "waits in all_reduce", 7, "node", 1, 1.0)


@pytest.fixture
def stalled(tmp_path):
    """A rank with a simulated clock; the function `hear(at, moves)` passes its heartbeat on."""
    clock, passed = [0.0], []
    calls = CallsOfStalledRank(
        lambda *sent: passed.append(sent), 3, tmp_path, AFTER_S, dump=lambda: DUMP, clock=lambda: clock[0]
    )

    def hear(at, moves):
        clock[0] = at
        calls("3", sign(moves).packed())
        return len(passed)

    return hear


def test_a_call_is_read_as_torch_npu_recorded_it(tmp_path):
    RankCalls.recorded(3, sign(), DUMP).write(tmp_path)
    own = read_calls(tmp_path)[3]
    assert (own.phase, own.where) == ("update", "waits in all_reduce")
    assert [(group.name, group.about, group.ranks) for group in own.groups] == [("group_name_2", "", (0, 3))]
    assert [(call.number, call.name, call.sizes, call.where) for call in own.calls] == [
        (3, "all_reduce", ((4, 2),), "train.py:24 in step"),
        (4, "all_reduce", ((4, 2),), "train.py:24 in step"),
    ]
    assert own.last_finished.number == 3 and own.waits_for.number == 4


def test_a_rank_that_stalls_writes_and_one_that_goes_on_removes(stalled, tmp_path):
    file = tmp_path / CALLS / "3.json"
    assert stalled(0, 1) == 1 and stalled(AFTER_S - 1, 1) == 2
    assert not file.exists()
    assert stalled(AFTER_S, 1) == 3
    assert file.exists()
    assert stalled(AFTER_S + 1, 2) == 4
    assert not file.exists()


def test_time_is_that_of_the_file_system(tmp_path):
    RankCalls.recorded(3, sign(), DUMP).write(tmp_path)
    os.utime(tmp_path / CALLS / "3.json", (5, 5))
    assert read_calls(tmp_path)[3].time == 5


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"rank": 1, "groups": [], "calls": [{}]})])
def test_a_file_that_is_none_rejected(tmp_path, content):
    (tmp_path / CALLS).mkdir()
    (tmp_path / CALLS / "1.json").write_text(content)
    with pytest.raises(CallsError, match="1.json is not a file of calls"):
        read_calls(tmp_path)


def test_without_torch_npu_there_are_no_calls(monkeypatch):
    from post_training.hang_detection import calls

    monkeypatch.setattr(calls.sys, "modules", {})
    assert calls.recorded_by_torch_npu() == {"pg_config": {}, "entries": []}


def test_a_functional_collective_has_its_own_name_and_one_of_torchs_own_is_where_torch_is():
    frames = [
        {"name": "__call__", "filename": "/site-packages/torch/_ops.py", "line": 1},
        {"name": "all_reduce", "filename": "/site-packages/torch/distributed/_functional_collectives.py", "line": 2},
        {"name": "post_backward", "filename": "/site-packages/torch/distributed/fsdp/_param_group.py", "line": 3},
    ]
    (call,) = RankCalls.recorded(3, sign(), {"pg_config": {}, "entries": [ENTRY | {"frames": frames}]}).calls
    assert (call.name, call.where) == ("all_reduce", "_param_group.py:3 in post_backward")
