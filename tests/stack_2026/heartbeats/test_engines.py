"""With verl's engines on emulated dies, a slow phase is not reported, and one that has stopped is."""

import json
from typing import Any

import pytest

from tests.forked import ENGINES_2026
from tests.ranks import run_ranks
from tests.stack_2026.heartbeats.program import ENGINES, PHASES, SLOW, STOPPED, UNCOUNTED
from tests.stack_2026.vllm_ascend.models import write_checkpoint


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The processes that each rank reported, by engine, phase and way."""
    folder = tmp_path_factory.mktemp("heartbeats")
    for model in {case.model for case in ENGINES.values()}:
        write_checkpoint(model, folder / model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # required by Megatron
        patch.setenv("OMP_NUM_THREADS", "1")
        run_ranks("tests.stack_2026.heartbeats.program", 2, folder, timeout=300, imported=ENGINES_2026)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_slow_phase_is_healthy_and_stopped_one_named(named, engine, phase):
    for rank in named:
        found = rank[engine][phase]
        assert found[SLOW] == []
        assert found[STOPPED] == [f"0 {phase}"]
        assert found[UNCOUNTED] == [f"0 {phase}"], "what is healthy is so because units are counted"
