"""Log-probs and entropy in vocabulary chunks match upstream and float64, and save memory by the meters of a die."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import MEGATRON
from tests.ranks import run_ranks

RANKS = 4
SIZES = {"tokens": 64, "hidden": 64, "vocabulary": 1000, "temperature": 0.9, "entropy": True, "against_float64": True,
         "ways": ["ours", "upstream"], "chunk_bytes": 128 * 64 * 4}  # fmt: skip
"""Chunks have 128 columns; of a rank's 500 or 250 columns, the last chunk has 116 or 122."""
REQUESTS = {
    **{
        f"tp{tp}_{dtype}_{'divided' if divided else 'whole'}": {"tp": tp, "dtype": dtype, "sequence_parallel": divided}
        for tp in (2, 4)
        for dtype in ("float32", "bfloat16")
        for divided in (False, True)
    },
    "log_probs_alone": {"tp": 2, "dtype": "float32", "entropy": False, "temperature": 1.0},
    "one_chunk": {"tp": 2, "dtype": "bfloat16", "chunk_bytes": 2**30},
    "all_masked": {"tp": 2, "dtype": "float32", "labels_masked": 1.0},
    "weight_without_main_grad": {"tp": 4, "dtype": "bfloat16", "wrapped": False},
    "fused_accumulation": {"tp": 4, "dtype": "bfloat16", "fuses_accumulation": True},
}
VALUES = ("log_probs", "entropy")
GRADIENTS = ("hidden", "weight")


def measure(folder: Path, requests: list[dict], ranks: int) -> list[list[dict]]:
    """Return the results of every request, by rank."""
    (folder / "request.json").write_text(json.dumps(requests))
    run_ranks("benchmarks.vocabulary_ranks", ranks, folder, imported=MEGATRON)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, list[dict]]:
    """Results of every rank, by name of the request."""
    found = measure(tmp_path_factory.mktemp("chunks"), [SIZES | each for each in REQUESTS.values()], RANKS)
    return dict(zip(REQUESTS, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize("name", REQUESTS)
def test_values_equal_upstream_and_float64(results, name):
    """Upstream's entropy subtracts two large sums; ours may differ from it by as much as it differs from float64."""
    for rank in results[name]:
        exact, own = rank["upstream"]["from_float64"], rank["ours"]
        assert set(exact) - set(GRADIENTS) == set(VALUES if REQUESTS[name].get("entropy", True) else VALUES[:1])
        for value in set(exact) - set(GRADIENTS):
            assert own["from_float64"][value] <= 1e-6
            assert own["from_upstream"][value] <= 1e-6 + exact[value] * (value == "entropy")


@pytest.mark.parametrize("name", [name for name, each in REQUESTS.items() if each["dtype"] == "float32"])
def test_gradients_equal_upstream_in_float32(results, name):
    for rank in results[name]:
        for other in ("from_upstream", "from_float64"):
            assert all(rank["ours"][other][gradient] <= 1e-6 for gradient in GRADIENTS), rank["ours"][other]


@pytest.mark.parametrize("name", [name for name, each in REQUESTS.items() if each["dtype"] == "bfloat16"])
def test_gradients_as_exact_as_upstream_in_bfloat16(results, name):
    """Products of chunks are rounded before being added in float32, unless the fused operator adds them."""
    allowed = 1.01 if name in ("fused_accumulation", "one_chunk") else 1.25
    for rank in results[name]:
        ours, upstream = rank["ours"]["from_float64"], rank["upstream"]["from_float64"]
        assert 1e-4 < upstream["hidden"] and ours["hidden"] <= allowed * upstream["hidden"]
        assert ours["weight"] <= 1.001 * upstream["weight"]
        assert rank["ours"]["from_upstream"]["weight"] < 1e-3


@pytest.fixture(scope="module")
def shard_of_deepseek(tmp_path_factory) -> dict:
    """Results of one of four ranks, with 4,096 tokens and 129,280 / 4 rows of the vocabulary."""
    request = {
        "tokens": 4096,
        "hidden": 64,
        "vocabulary": 129_280 // 4,
        "tp": 1,
        "ways": ["ours", "mindspeed", "upstream"],
    }
    return measure(tmp_path_factory.mktemp("shard"), [request], 1)[0][0]


@pytest.mark.slow
def test_peak_is_a_quarter_of_upstream_at_most(shard_of_deepseek):
    upstream, mindspeed, ours = (shard_of_deepseek[way]["peak"] for way in ("upstream", "mindspeed", "ours"))
    logits = 4096 * 129_280 // 4
    assert upstream > 6 * logits and mindspeed > 8 * logits
    assert ours <= 0.25 * upstream, (ours, upstream)
    assert shard_of_deepseek["ours"]["peak_forward"] <= 0.1 * upstream


@pytest.mark.slow
def test_plan_knows_the_peak(shard_of_deepseek):
    from post_training.plan.activations import logits_at_once

    planned = logits_at_once(4096, 129_280 // 4, itemsize=2, chunk_bytes=32 * 2**20)
    assert shard_of_deepseek["ours"]["peak"] == pytest.approx(planned, rel=0.05)
    whole = logits_at_once(4096, 129_280 // 4, itemsize=2, chunk_bytes=None)
    assert shard_of_deepseek["mindspeed"]["peak"] < whole
