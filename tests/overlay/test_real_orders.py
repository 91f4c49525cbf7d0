"""The real patches on the real upstream end in one state, whatever is imported first.

This is a sample of what `python -m tests.overlay.order_program --all` runs: both directions of a full order, random
orders, and the activation between and after imports.
"""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.overlay.conftest import REPOSITORY
from tests.overlay.order_program import ACTIVATE, MODULES, all_pairs, contradictions, random_orders

EARLY = [name for name in MODULES if name.startswith("vllm.v1.sample")]
BETWEEN = [EARLY[0], ACTIVATE, *MODULES[::-1]]
AFTER = ["verl.utils.tracking", *EARLY, ACTIVATE, *MODULES]
OURS_FIRST = [ACTIVATE, "post_training.models.megatron.deepseek_v3_config", *MODULES]
TOO_LATE = ["megatron.core", ACTIVATE]
SPOILED = [ACTIVATE, *MODULES, "spoil verl.models.mcore:hf_to_mcore_config"]


@pytest.mark.slow
def test_all_orders_end_in_the_same_state():
    if any(importlib.util.find_spec(name) is None for name in ("verl", "vllm", "vllm_ascend", "torch_npu")):
        pytest.skip("the upstreams or the emulated NPU are not installed here")
    same = [[ACTIVATE, *MODULES], [ACTIVATE, *MODULES[::-1]], *random_orders(1), BETWEEN, AFTER]
    result = subprocess.run(
        [sys.executable, "-m", "tests.overlay.order_program"],
        input=json.dumps([*same, OURS_FIRST, TOO_LATE, SPOILED]),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    *states, ours_first, too_late, spoiled = json.loads(result.stdout)
    assert len(states[0]["applied"]) > 30 and not states[0]["problems"], states[0]["problems"]
    assert states[0]["applied"] == states[0]["effective"]
    assert all(nest for name, nest in states[0]["nesting"].items() if name.endswith("generate_sequences"))
    assert [state for state in states if state != states[0]] == []
    assert too_late is None, "a patch that must precede a module was let through after it"
    assert spoiled != states[0] and spoiled["problems"], "a copy of upstream's own must not go unnoticed"
    part = {**states[0], "names": dict(list(states[0]["names"].items())[:5])}
    assert contradictions({"full": states[0], "ours": ours_first, "part": part, "late": None}, "full") == []
    assert ours_first["applied"] == states[0]["applied"]
    assert contradictions({"full": states[0], "spoiled": spoiled}, "full")


def test_the_full_run_has_every_ordered_pair_at_every_activation():
    scenarios = {tuple(steps) for steps in all_pairs()}
    assert len(scenarios) == 3 * len(MODULES) * (len(MODULES) - 1) > 1000
    assert len({tuple(steps) for steps in random_orders(200)}) == 200
