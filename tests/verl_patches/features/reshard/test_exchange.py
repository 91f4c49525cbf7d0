"""The exchange on four emulated dies: exact for random layouts, bounded, and refused when models do not fit."""

import json
from pathlib import Path

import pytest

from tests.ranks import run_ranks

WORLD = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Runs every check once on one set of ranks; a failed check fails here with the ranks' output."""
    folder: Path = tmp_path_factory.mktemp("exchange")
    run_ranks("tests.verl_patches.features.reshard.exchange_program", WORLD, folder, timeout=240)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.slow
def test_random_layouts_are_exact(results: list[dict]) -> None:
    assert all(result["layouts"] >= 60 for result in results)


@pytest.mark.slow
def test_buckets_bound_the_staging(results: list[dict]) -> None:
    assert all(result["rounds"] == results[0]["rounds"] for result in results)


@pytest.mark.slow
def test_no_byte_is_received_twice(results: list[dict]) -> None:
    assert any(case["experts"] for result in results for case in result["received"])


@pytest.mark.slow
def test_one_flipped_byte_is_found(results: list[dict]) -> None:
    assert all(result["flipped"] == results[0]["flipped"] for result in results)


@pytest.mark.slow
def test_a_misfit_is_refused_on_every_rank(results: list[dict]) -> None:
    assert all(result["refused"] == results[0]["refused"] for result in results)


@pytest.mark.slow
def test_the_device_counts_nothing_superfluous(results: list[dict]) -> None:
    # The integer in which all agree, to the device and back.
    assert all(result["steady"]["host"] == 8 for result in results)


@pytest.mark.slow
def test_expert_bytes_transposed_are_those_sent_or_kept(results: list[dict]) -> None:
    found = [result["transposed"] for result in results]
    assert sum(rank["sent"] for rank in found) > 0
    assert all(rank["own"] == rank["sent"] + rank["copied"] for rank in found)
    assert all(rank["whole experts"] > rank["own"] for rank in found if rank["sent"])


@pytest.mark.slow
def test_fifty_steps_leak_nothing(results: list[dict]) -> None:
    assert all(result["allocated"] > 0 for result in results)
