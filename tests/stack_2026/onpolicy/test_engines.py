"""An update that uses its own forward's log-probs equals verl's, which uses a separate forward's, bit for bit."""

from typing import Any

import pytest

from tests.stack_2026.engine_ranks import run_engines
from tests.stack_2026.onpolicy.program import ENGINES, FAULTS, LOSSES

# GSPO detaches its ratio, so attached old log-probs change nothing there.
HARMLESS = ("gspo", "attached")
PAIRS = [(engine, " ".join(loss)) for engine in ENGINES for loss in LOSSES]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each of two ranks."""
    models = (case.model for case in ENGINES.values())
    return run_engines("tests.stack_2026.onpolicy.program", models, tmp_path_factory.mktemp("onpolicy"))


@pytest.mark.parametrize(("engine", "loss"), PAIRS)
def test_gradients_are_upstreams_bit_for_bit(ranks, engine, loss):
    for rank in ranks:
        found = rank[engine][loss]
        assert found["own"]["gradients"] == found["upstream"]["gradients"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("engine", "loss"), PAIRS)
def test_planted_fault_changes_the_gradients(ranks, engine, loss, fault):
    found = [rank[engine][loss] for rank in ranks]
    changed = any(rank[fault]["gradients"] != rank["upstream"]["gradients"] for rank in found)
    assert changed is ((loss.partition(" ")[0], fault) != HARMLESS)


@pytest.mark.parametrize(("engine", "loss"), PAIRS)
def test_metrics_are_those_of_transformers(ranks, engine, loss):
    """Check that the first rank reports metrics of all ranks' answers; verl's own update reports none of them."""
    found = ranks[0][engine][loss]
    assert found["own"]["metrics"] == pytest.approx(found["expected"], rel=1e-4)
    assert found["upstream"]["metrics"] == {} == ranks[1][engine][loss]["own"]["metrics"]
