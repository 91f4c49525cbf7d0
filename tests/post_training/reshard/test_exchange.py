"""The exchange on four emulated dies is exact for random layouts, bounded, and rejects models that do not fit."""

import json
from pathlib import Path

import pytest

from tests.forked import PYTORCH
from tests.ranks import run_ranks

WORLD = 4
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Results of each rank; all tests share one run of the ranks."""
    folder: Path = tmp_path_factory.mktemp("exchange")
    run_ranks("tests.post_training.reshard.exchange_program", WORLD, folder, imported=PYTORCH)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def test_random_layouts_are_exact(results: list[dict]) -> None:
    for result in results:
        assert len({case["layouts"] for case in result["layouts"]}) >= 50
        for case in result["layouts"]:
            assert case["tensors"] > 0 and case["differing"] == [], case["layouts"]
            assert not case["moved"], case["layouts"]


def test_second_run_costs_its_buckets_and_one_agreement(results: list[dict]) -> None:
    for case in (case for result in results for case in result["layouts"]):
        assert case["planning again"] == [0, 0.0]
        assert case["buckets"][0] == case["buckets"][1] == case["collectives again"] - 1 - case["casts"]


def test_casts_that_change_nothing_are_counted_as_0(results: list[dict]) -> None:
    cases = [case for result in results for case in result["layouts"]]
    assert {case["casts"] for case in cases} == {True, False}
    assert all(case["changed by casts"] == 0 for case in cases)


def test_rounded_router_biases_are_counted_and_named(results: list[dict]) -> None:
    for found in (result["rounded bias"] for result in results):
        assert found["changed"] == found["lost"] > 0
        assert found["differing"] and all("e_score_correction_bias" in name for name in found["differing"])


def test_missing_wait_detected(results: list[dict]) -> None:
    assert all(result["without waiting"] for result in results)


def test_smaller_limits_mean_more_buckets_and_less_staging(results: list[dict]) -> None:
    for result in results:
        for found in result["staging"]:
            assert found["differing"] == [] and 0 < found["staging"] <= 2 * found["bucket"]
        one_after_the_other = [found["buckets"] for found in result["staging"] if not found["overlap"]]
        assert one_after_the_other == sorted(set(one_after_the_other), reverse=True) and one_after_the_other[-1] == 1
    assert len({str([found["buckets"] for found in result["staging"]]) for result in results}) == 1


def test_a_rank_receives_what_it_does_not_hold_once_and_no_expert_that_it_does_not_serve(results: list[dict]) -> None:
    cases = [case for result in results for case in result["received"]]
    assert any(case["experts received"] for case in cases)
    for case in cases:
        assert case["received"] == case["missing"]
        assert case["experts received"] == case["experts missing"]
    for seed in range(len(results[0]["received"])):
        sent, received = (sum(result["received"][seed][way] for result in results) for way in ("sent", "received"))
        assert sent == received


def test_one_flipped_byte_is_found(results: list[dict]) -> None:
    for result in results:
        assert result["verified"]["at first"] == result["verified"]["again"] == []
        (name,) = result["verified"]["flipped"]
        assert name.endswith("up_proj.weight")


def test_a_misfit_rejected_on_every_rank(results: list[dict]) -> None:
    said = results[0]["misfits"]
    assert "rank 2" in said["absent"] and "model.norm.weight" in said["absent"]
    assert "model.norm.weight" in said["cast"] and "no cast is declared" in said["cast"]
    assert "e_score_correction_bias" in said["undeclared"] and "no cast is declared" in said["undeclared"]
    assert "rank 3 has" in said["different"]
    assert "another reshard plan" in said["disagreed"]
    assert all(result["misfits"] == said for result in results)


def test_the_device_counts_nothing_superfluous(results: list[dict]) -> None:
    """Only buckets and one all-reduced integer are sent; each byte is copied once at its source and at its target."""
    for steady in (result["steady"] for result in results):
        assert steady["buckets"] > 1 and steady["collectives"] == steady["buckets"] + 1
        assert set(steady["counted"]) == {"all_to_all", "all_reduce"}
        assert steady["counted"]["all_to_all"]["count"] == steady["buckets"]
        assert steady["counted"]["all_reduce"] == {"count": 1, "bytes": 4}
        assert steady["copied on the device"] == steady["moved"] > 0
        # The all-reduced integer, copied to the device and back.
        assert steady["host"] == 8


def test_expert_bytes_transposed_are_those_sent_or_kept(results: list[dict]) -> None:
    found = [result["transposed"] for result in results]
    assert all(rank["differing"] == [] for rank in found)
    assert sum(rank["sent"] for rank in found) > 0
    assert all(rank["own"] == rank["sent"] + rank["copied"] for rank in found)
    assert all(rank["whole experts"] > rank["own"] for rank in found if rank["sent"])


def test_fifty_steps_leak_nothing_and_move_nothing(results: list[dict]) -> None:
    for found in (result["fifty steps"] for result in results):
        assert found["differing"] == [] and not found["moved"]
        assert 0 < found["after"] <= found["before"]
