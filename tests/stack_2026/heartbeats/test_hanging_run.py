"""If a rank hangs in a run of verl, it is named, the run ends, and the recorded collectives say who waits for it."""

import json

import pytest

from post_training.report.heartbeat import HEARTBEAT
from scripts.replay_hang import main
from tests.stack_2026.heartbeats.hanging_library import RANK, UPDATE
from tests.stack_2026.rehearsals import rehearse
from verl_plugin.heartbeats.settings import ENGINES, KEY

pytestmark = pytest.mark.slow

_LIBRARIES = ("tests.stack_2026.heartbeats.hanging_library", "verl_plugin.alltoallv.engines", ENGINES)
# A machine with few cores starts the run slowly, so only the update has a short limit.
_LIMITS = (
    f"+{KEY}.interval_s=1",
    f"+{KEY}.calls_after_s=5",
    f"+{KEY}.warn_s={{update:30}}",
    f"+{KEY}.end_s={{update:45}}",
)


def test_hanging_rank_named_run_ended_and_hang_replayed(tmp_path, capsys):
    library = f"actor_rollout_ref.model.external_lib=[{','.join(_LIBRARIES)}]"
    options = ("--model", "qwen3", "--backend", "fsdp2", "--dies", "2", "--steps", str(UPDATE + 1))
    run = rehearse(tmp_path, *options, library, *_LIMITS)
    assert run.returncode == 1
    faults = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert {(each["rank"], each["phase"], each["step"]) for each in faults} == {(RANK, "update", UPDATE)}
    assert [each["ended"] for each in faults] == [False, True] and faults[0]["waiting"] == [1 - RANK]
    assert json.loads((tmp_path / HEARTBEAT).read_text())["step"] == UPDATE
    capsys.readouterr()
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert f"Cause: computes. Rank {RANK} did not enter a collective" in said and "in computes_for_ever" in said
