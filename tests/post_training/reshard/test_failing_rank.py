"""If a rank fails in a reshard, the others raise in time and say where, and none generates from mixed weights."""

import json
import re
from pathlib import Path

import pytest

from tests.forked import PYTORCH
from tests.post_training.reshard.failing_rank_program import CULPRIT, TIMEOUT
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow
WORLD = 4
SURVIVORS = [rank for rank in range(WORLD) if rank != CULPRIT]


def outcome(folder: Path, way: str) -> dict[int, dict]:
    """Run the ranks with a fault, and return the results of each surviving rank."""
    (folder / "way.txt").write_text(way)
    run_ranks("tests.post_training.reshard.failing_rank_program", WORLD, folder, timeout=300, imported=PYTORCH)
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in SURVIVORS}


def assert_rejected(told: dict) -> None:
    assert (told["before"]["type"], told["before"]["differing"]) == (None, [])
    assert told["reshard"]["type"] == "ReshardError"
    assert told["generate"]["type"] == "WeightsNotWholeError"
    assert "set 2 did not finish (the last complete one was 1)" in told["generate"]["text"]


def test_nothing_fails_without_a_fault(tmp_path: Path) -> None:
    for told in outcome(tmp_path, "nothing").values():
        assert [told[what]["type"] for what in ("before", "reshard", "generate", "after")] == [None] * 4
        assert told["before"]["differing"] == told["after"]["differing"] == []


def test_a_rank_that_raises_is_quoted_by_all_and_the_next_reshard_succeeds(tmp_path: Path) -> None:
    found = outcome(tmp_path, "raises")
    found[CULPRIT] = json.loads((tmp_path / f"{CULPRIT}.json").read_text())
    texts = {told["reshard"]["text"] for told in found.values()}
    assert len(texts) == 1
    place = (
        rf"rank {CULPRIT} failed in bucket 2 of \d+ of the leg from training weights, packing model\.\S+ for rank \d: "
    )
    assert re.search(place, texts.pop())
    for told in found.values():
        assert_rejected(told)
        assert told["reshard"]["seconds"] < TIMEOUT / 2
        assert (told["after"]["type"], told["after"]["differing"]) == (None, [])


@pytest.mark.parametrize(("way", "number"), [("dies", 2), ("does not come", 1)])
def test_a_rank_that_is_gone_is_named(tmp_path: Path, way: str, number: int) -> None:
    for rank, told in outcome(tmp_path, way).items():
        assert_rejected(told)
        text = told["reshard"]["text"]
        said = rf"rank {rank} did not hear from ranks \[{CULPRIT}\], in bucket "
        reached = re.search(said + r"(\d+) of \d+ of the leg from training weights or before it: ", text)
        assert reached and int(reached[1]) >= number, text
        # HCCL's own reason, which also names the rank, is kept.
        reason = rf"HcclAlltoAllV on rank {rank} of {WORLD}: no answer after \S+ s from .*rank {CULPRIT} "
        assert re.search(reason, text), text
        assert told["reshard"]["seconds"] < TIMEOUT + 6
