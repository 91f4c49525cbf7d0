"""Planted hangs on emulated dies: the culprit rank is named, and a replay stops in the same calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from post_training.hang_detection.calls import BUFFER, CALLS
from post_training.hang_detection.replay import COMPUTES, NO_ANSWER, ORDER, SKIPPED
from scripts.replay_hang import main
from tests.forked import PYTORCH
from tests.ranks import run_ranks
from tests.stack_2026.hang_detection.hanging_program import CALLS_IN, CULPRIT, SEEN, WORLD


def outcome(folder: Path, way: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the ranks with a hang, and return the exit code and the output of replay_hang.py."""
    (folder / "way.txt").write_text(way)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BUFFER, "100")
        patch.setenv("NPU_EMULATOR_UNLIKE_COLLECTIVES", "hang")
        run_ranks("tests.stack_2026.hang_detection.hanging_program", WORLD, folder, timeout=240, imported=PYTORCH)
    capsys.readouterr()
    return main([str(folder / SEEN if way in CALLS_IN else folder)]), capsys.readouterr().out


def test_healthy_run_has_no_hang(tmp_path, capsys):
    code, said = outcome(tmp_path, "nothing", capsys)
    assert code == 0 and said.startswith("No rank waits in a collective")
    assert not list((tmp_path / CALLS).glob("*"))


@pytest.mark.parametrize(
    ("way", "cause", "detail"),
    [
        ("skips", SKIPPED, "as number 3 of second"),
        ("skips alike", ORDER, "rank 1 entered all_gather_into_tensor 3 of second"),
        ("swaps", ORDER, "rank 1 entered all_reduce 4 of second"),
        ("computes", COMPUTES, "in computes_for_ever"),
        ("stops", NO_ANSWER, "rank 1 recorded no calls"),
    ],
)
def test_rank_to_blame_named_and_hang_replayed(tmp_path, capsys, way, cause, detail):
    code, said = outcome(tmp_path, way, capsys)
    (blamed,) = [line for line in said.splitlines() if line.startswith("Cause: ")]
    assert code == 1 and blamed.startswith(f"Cause: {cause}. ")
    assert detail.lower() in blamed.lower() and f"ank {CULPRIT} " in blamed
    waiting = " and ".join(str(rank) for rank, (_, open_calls) in CALLS_IN[way].items() if open_calls)
    assert f"Replay with seeds 1 to 3: ranks {waiting.replace('0 and 1 and', '0, 1 and')} stopped in the same" in said
