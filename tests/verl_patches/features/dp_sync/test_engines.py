"""Real engines whose cache is too small: they preempt between sync windows and generate upstream's tokens."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.verl_patches.features.rollout_rebalance.cases import AGREED, CASES
from tests.verl_patches.features.rollout_rebalance.runs import Found, run_cases

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(importlib.util.find_spec("vllm_ascend") is None, reason="vllm-ascend is not installed"),
]
KINDS = ("long", "drawn")
PREEMPTING = [name for name in CASES if name.startswith("preempts")]


@pytest.fixture(scope="module", params=PREEMPTING)
def found(request, tmp_path_factory) -> list[dict[str, Any]]:
    """Return the results of every rank."""
    name = request.param
    ranks: Found = run_cases(tmp_path_factory.mktemp("window"), [name])
    for run in (f"{kind} {how}" for kind in KINDS for how in AGREED):
        print(name, run, ranks[name][0][run]["metrics"], [rank[run]["preempted"] for rank in ranks[name]])
    return ranks[name]


def metrics(found: list[dict[str, Any]], run: str) -> dict[str, float]:
    """Return the decode loop's metrics, which are equal on all ranks."""
    names = ("agreements", "decode_steps", "prefill_steps", "wasted_steps")
    (alike,) = {tuple(rank[run]["metrics"][name] for name in names) for rank in found}
    return dict(zip(names, alike, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_upstream_though_requests_were_preempted(found, kind):
    for rank in found:
        for what in ("tokens", "reasons"):
            windowed, every, upstream = (rank[f"{kind} {how}"][what] for how in ("windowed", "every", "upstream"))
            assert windowed == every == upstream
        assert min(rank[f"{kind} {how}"]["preempted"] for how in AGREED) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_of_16_takes_a_sixteenth_of_the_agreements(found, kind):
    windowed, every = metrics(found, f"{kind} windowed"), metrics(found, f"{kind} every")
    assert windowed["decode_steps"] >= 256
    assert windowed["agreements"] <= windowed["prefill_steps"] + windowed["decode_steps"] / 16 + 2
    assert windowed["wasted_steps"] <= 15
    # Without windows: at most one agreement per forward, plus the last one, in which all have ended. A control.
    assert every["agreements"] <= every["decode_steps"] + every["prefill_steps"] + 1
    assert every["agreements"] > every["prefill_steps"] + every["decode_steps"] / 16 + 2
