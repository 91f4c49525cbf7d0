"""The real patches on the real upstream end in one state, whatever is imported first."""

import importlib.util
import json
import random
import subprocess
import sys

import pytest

from overlay.discovery import load
from overlay.pins import Pins
from tests.overlay.conftest import REPOSITORY

RANDOM_ORDERS = 1
PINS = Pins.read()
MODULES = sorted({patch.module for patch in load(PINS.rooms()) if patch.kind != "provide"})


def scenarios() -> list[dict[str, list[str]]]:
    """Every ordered pair of targets is in the order or its reverse; then random orders, and a late activation."""
    orders = [MODULES, MODULES[::-1]]
    generator = random.Random(2)
    orders += [generator.sample(MODULES, len(MODULES)) for _ in range(RANDOM_ORDERS)]
    early = [name for name in MODULES if name.startswith("vllm.v1.sample")]
    plain = [{"before": [], "after": order, "spoil": ""} for order in orders]
    spoiled = {"before": [], "after": MODULES, "spoil": "verl.models.mcore:hf_to_mcore_config"}
    return [*plain, {"before": early, "after": MODULES, "spoil": ""}, spoiled]


@pytest.mark.slow
def test_all_orders_end_in_the_same_state():
    if any(importlib.util.find_spec(name) is None for name in ("verl", "vllm", "vllm_ascend", "torch_npu")):
        pytest.skip("the upstreams or the emulated NPU are not installed here")
    result = subprocess.run(
        [sys.executable, "-m", "tests.overlay.order_program"],
        input=json.dumps(scenarios()),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    *states, spoiled = json.loads(result.stdout)
    assert "failed" not in states[0], states[0]["failed"]
    assert len(states[0]["applied"]) > 30 and not states[0]["problems"], states[0]["problems"]
    assert states[0]["applied"] == states[0]["effective"]
    assert all(nest for name, nest in states[0]["nesting"].items() if name.endswith("generate_sequences"))
    late = states.pop()
    assert late is None or drop_rebound(late) == drop_rebound(states[0])
    assert [state for state in states if state != states[0]] == []
    assert spoiled != states[0] and spoiled["problems"], "a copy of upstream's own must not go unnoticed"


def drop_rebound(state: dict) -> dict:
    """A state without the names that exist only because a module was imported early."""
    return {key: value for key, value in state.items() if key != "names"}
