"""Each phase of a step reports its own memory peak, including memory of other processes on the die."""

from typing import Any

import pytest

from post_training.report.metrics import ALLOCATED_BYTES_PREFIX, PEAK_BYTES_PREFIX
from tests.stack_2026.engine_ranks import run_engines
from tests.stack_2026.verl_plugin.phase_peaks_program import CYCLES, ENGINES, NEIGHBOUR_BYTES, PHASES, PLANTED_BYTES

# torch's allocator reserves die memory in segments of up to 20 MiB for smaller tensors; two may be partly in use.
SEGMENTS = 40 << 20
STEPS = [(engine, planted) for engine in ENGINES for planted in PHASES]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each of two ranks."""
    models = (case.model for case in ENGINES.values())
    return run_engines("tests.stack_2026.verl_plugin.phase_peaks_program", models, tmp_path_factory.mktemp("peaks"))


def peaks(rank: dict[str, Any], engine: str, planted: str) -> dict[str, int]:
    metrics = rank[engine][planted]["metrics"]
    return {phase: metrics[PEAK_BYTES_PREFIX + phase] for phase in (*PHASES, "idle")}


@pytest.mark.parametrize(("engine", "planted"), STEPS)
def test_tensor_shows_in_the_phase_that_holds_it_alone(ranks, engine, planted):
    """Rank 1 allocates the tensor; both ranks report the metrics of the fullest die."""
    for rank in ranks:
        found, plain = peaks(rank, engine, planted), peaks(rank, engine, "none")
        assert found.pop(planted) - plain.pop(planted) > PLANTED_BYTES - SEGMENTS
        assert found == pytest.approx(plain, abs=SEGMENTS)


@pytest.mark.parametrize("engine", ENGINES)
def test_peaks_are_the_emulated_dies_own(ranks, engine):
    """The die's meter counts this process's memory in segments, and excludes the other process."""
    for planted in ("none", *PHASES):
        found = peaks(ranks[0], engine, planted)
        for phase in PHASES:
            die = max(rank[engine][planted]["emulator"][phase] for rank in ranks) + NEIGHBOUR_BYTES
            assert 0 <= die - found[phase] < SEGMENTS, (planted, phase)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_left_that_was_not_at_the_peak(ranks, engine):
    metrics = ranks[0][engine]["none"]["metrics"]
    for phase in (*PHASES, "idle"):
        left, peak = metrics[ALLOCATED_BYTES_PREFIX + phase], metrics[PEAK_BYTES_PREFIX + phase]
        assert NEIGHBOUR_BYTES < left <= peak
    assert "memory/peak_bytes/rollout" not in metrics  # no worker has run that phase


@pytest.mark.parametrize("engine", ENGINES)
def test_fifty_departures_of_training_leave_no_memory_behind(ranks, engine):
    for rank in ranks:
        rows = rank[engine]["cycles"]
        assert rows == rows[:1] * CYCLES and rank[engine]["same"]
        away, _, back, _ = rows[0]
        assert away < back  # only the reference stays
        assert len({tuple(row) for row in rank[engine]["leaks"]}) == 3  # control: a leaked tensor shows up
