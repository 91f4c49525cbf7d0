"""With verl's engines on emulated dies, a slow phase is not reported, and one that has stopped is."""

from typing import Any

import pytest

from tests.stack_2026.engine_ranks import run_engines
from tests.stack_2026.heartbeats.program import ENGINES, PHASES, SLOW, STOPPED, UNCOUNTED


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The processes that each rank reported, by engine, phase and way."""
    models = (case.model for case in ENGINES.values())
    return run_engines("tests.stack_2026.heartbeats.program", models, tmp_path_factory.mktemp("heartbeats"))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_slow_phase_is_healthy_and_stopped_one_named(named, engine, phase):
    for rank in named:
        found = rank[engine][phase]
        assert found[SLOW] == []
        assert found[STOPPED] == [f"0 {phase}"]
        assert found[UNCOUNTED] == [f"0 {phase}"], "what is healthy is so because units are counted"
