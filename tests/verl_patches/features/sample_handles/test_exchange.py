"""The exchange on four emulated dies: the batch is the one that verl would have sent, and faults are detected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import PYTORCH
from tests.ranks import run_ranks

WORLD = 4
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Return the results of every rank; all checks run on one set of ranks."""
    folder: Path = tmp_path_factory.mktemp("exchange")
    run_ranks("tests.verl_patches.features.sample_handles.exchange_program", WORLD, folder, imported=PYTORCH)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def test_every_column_is_the_one_that_verl_would_have_sent(results: list[dict]) -> None:
    for result in results:
        assert len(result["wrong"]) == 18 and not any(result["wrong"].values()), result["wrong"]


def test_a_step_has_one_collective_with_the_tokens_of_its_own_part(results: list[dict]) -> None:
    for result in results:
        received, tokens = result["bytes"]
        assert result["collectives"] == 1 and received == tokens > 0


def test_log_probs_stay_and_advantages_arrive(results: list[dict]) -> None:
    names = ("reference is kept", "reference is not sent", "old is absent", "advantages", "empty after the update")
    assert [{name: result[name] for name in names} for result in results] == [dict.fromkeys(names, True)] * WORLD


def test_the_driver_pickles_few_bytes_of_a_sample(results: list[dict]) -> None:
    """In the job with this batch, the tokens of one sample alone would be 4096 bytes."""
    assert 0 < results[0]["pickled"] <= 64 * 512 + 4096 * 32


def test_a_failure_leaves_nothing_and_an_old_handle_is_named_with_the_step(results: list[dict]) -> None:
    for result in results:
        assert result["empty after a failure"]
        assert result["of the step before"].startswith("in step 7 no worker has sample ")
        assert result["of the step before"].endswith("; there are 12 to 19")


def test_answers_that_are_only_looked_at_are_whole_and_nobody_keeps_them(results: list[dict]) -> None:
    """The cases are a validation, a greedy baseline, and answers to train on as the control."""
    for result in results:
        assert result["whole"] == [[True, False, True], [True, False, True], [False, True, False]]
        assert result["first"] == [False, False, True]


def test_changed_order_and_sender_detected(results: list[dict]) -> None:
    assert all("input_ids" in result["identity"] for result in results)
    assert results[0]["lengths differ"] and any("input_ids" in result["sender's order"] for result in results)
