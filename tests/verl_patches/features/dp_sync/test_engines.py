"""Real engines whose cache is too small: leases with preemption between them, and the tokens of upstream."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.verl_patches.features.rollout_rebalance.cases import AGREED, CASES
from tests.verl_patches.features.rollout_rebalance.runs import Found, run_cases

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("vllm_ascend") is None, reason="vllm-ascend is not installed"),
]
PREEMPTING = [name for name in CASES if name.startswith("preempts")]


@pytest.fixture(scope="module", params=PREEMPTING)
def found(request, tmp_path_factory) -> list[dict[str, Any]]:
    """What every rank found."""
    name = request.param
    ranks: Found = run_cases(tmp_path_factory.mktemp("lease"), [name])
    for how in AGREED:
        print(
            name,
            how,
            ranks[name][0][f"long {how}"]["figures"],
            [rank[f"long {how}"]["preempted"] for rank in ranks[name]],
        )
    return ranks[name]


def figures(found: list[dict[str, Any]], how: str) -> dict[str, float]:
    """Of the decode loop, which all ranks have alike."""
    names = ("agreements", "decode_steps", "prefill_steps", "wasted_steps")
    (alike,) = {tuple(rank[f"long {how}"]["figures"][name] for name in names) for rank in found}
    return dict(zip(names, alike, strict=True))


def test_tokens_are_those_of_upstream_though_requests_were_preempted(found):
    for rank in found:
        for what in ("tokens", "reasons"):
            assert rank["long leased"][what] == rank["long every"][what] == rank["long upstream"][what]
        assert min(rank[f"long {how}"]["preempted"] for how in AGREED) > 0


def test_a_lease_of_16_takes_a_sixteenth_of_the_agreements(found):
    leased, every = figures(found, "leased"), figures(found, "every")
    assert leased["decode_steps"] >= 256
    assert leased["agreements"] <= leased["prefill_steps"] + leased["decode_steps"] / 16 + 2
    assert leased["wasted_steps"] <= 15
    # Without leases at most one a forward, and the one that finds that all have ended; a control of the above.
    assert every["agreements"] <= every["decode_steps"] + every["prefill_steps"] + 1
    assert every["agreements"] > every["prefill_steps"] + every["decode_steps"] / 16 + 2
