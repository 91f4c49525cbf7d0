"""Metrics of two dies are reduced if their names are equal; otherwise both ranks end the run with the difference."""

from __future__ import annotations

import json
from statistics import fmean

import pytest

from tests.forked import PYTORCH
from tests.ranks import run_ranks
from tests.verl_patches.features.measure.agreement_program import SEEN


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("metrics")
    run_ranks("tests.verl_patches.features.measure.agreement_program", 2, folder, 120, imported=PYTORCH)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_same_names_give_largest_values(ranks):
    assert [rank["same"] for rank in ranks] == [{"samples/bytes_received": 4096.0, "timing_s/update": 2.0}] * 2


@pytest.mark.parametrize(
    ("case", "difference"),
    [
        ("lacks", "lacks samples/bytes_received"),
        ("more", "alone has timing_s/ref"),
        ("renamed", "lacks timing_s/update and alone has timing_s/values"),
        ("step", "lacks start/first/rollout, start/last/rollout and alone has start/first/ref, start/last/ref"),
    ],
)
def test_other_names_rejected_with_the_difference(ranks, case, difference):
    """Without the check, `timing_s/values` of one rank is compared with `timing_s/update` of the other."""
    sentence = (
        f"ranks measured different metrics in one step: compared with rank 0, rank 1 {difference}. Use the "
        "same code and settings on every node; scripts/doctor.py --ray ADDRESS compares them"
    )
    assert [rank[case] for rank in ranks] == [sentence] * 2


@pytest.mark.parametrize("case", SEEN)
def test_means_are_over_the_tokens_of_all_ranks(ranks, case):
    """A rank with more tokens has more weight, and one without tokens has none."""
    differences, left = ([each for of_rank in SEEN[case] for each in of_rank[part]] for part in (0, 1))
    expected = {}
    if differences:
        expected |= {"training/rollout_logprob_diff_mean": fmean(differences)}
        expected |= {"training/rollout_logprob_diff_max": max(differences)}
    if left:
        expected |= {"rollout/kept_probability": fmean(left)}
    assert [rank[f"means {case}"] for rank in ranks] == [pytest.approx(expected)] * 2


def test_reported_sums_are_of_the_same_name(ranks):
    assert [rank["sums same"] for rank in ranks] == [{"actor/pg_loss": 3.0, "actor/ppo_kl": 0.75}] * 2
    for rank in ranks:
        assert rank["sums other"].startswith("actor/kl_loss is reported by 1 of 2 ranks that train together. Use ")
