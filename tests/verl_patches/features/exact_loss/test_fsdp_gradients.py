"""Gradients of verl's FSDP actor against one plain pass over the whole batch.

The error is the norm of the difference over the norm of the expected gradients, over all weights.
"""

import json
from statistics import mean

import pytest

from tests.ranks import run_ranks
from tests.verl_patches.features.exact_loss.test_gradients import MODES, NOTICEABLE, TOLERANCE
from tests.verl_patches.features.exact_loss.whole_pass import write_reference

pytestmark = pytest.mark.slow

PROGRAM = "tests.verl_patches.features.exact_loss.fsdp_gradients_program"
CUTS = {f"{mode} {micro}": {"mode": mode, "micro": micro} for mode in MODES for micro in (1, 2, 4, 8)}
# Every sequence fits, and several of the short ones together do.
CUTS |= {f"{mode} at most 160": {"mode": mode, "limit": 160} for mode in MODES}
SEVERAL = {"two updates, two epochs": {"mode": "token-mean", "micro": 2, "mini": 8, "epochs": 2}}
UPSTREAM = {"upstream": {"mode": "token-mean", "micro": 2, "exact": False}}


@pytest.fixture(scope="module", params=[1, 2], ids=lambda ranks: f"{ranks} dies")
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    write_reference(folder, MODES)
    (folder / "plan.json").write_text(json.dumps(CUTS | SEVERAL | UPSTREAM))
    run_ranks(PROGRAM, request.param, folder, timeout=500)
    ranks = [json.loads((folder / f"rank{rank}of{request.param}.json").read_text()) for rank in range(request.param)]
    # Whole gradients and sums over ranks: every rank has the same, but for what upstream reports.
    assert all(rank[name] == ranks[0][name] for rank in ranks for name in CUTS | SEVERAL)
    return ranks[0]


def test_gradients_and_reported_losses_are_those_of_one_pass(found):
    print({name: f"{found[name]['errors'][0]:.1e}" for name in CUTS})
    for name in CUTS:
        update = found[name]
        assert update["errors"][0] < TOLERANCE, name
        assert update["losses"] == pytest.approx(update["expected_losses"], rel=1e-5, abs=1e-6), name


def test_each_of_several_updates_is_exact(found):
    (update,) = (found[name] for name in SEVERAL)
    # Half the batch has smaller gradients, and its plain pass in float32 an error of 0.9e-6 already.
    assert len(update["errors"]) == 4 and max(update["errors"]) < 2 * TOLERANCE
    assert update["losses"] == pytest.approx([mean(update["expected_losses"])], rel=1e-5, abs=1e-6)


def test_upstreams_gradients_are_others(found):
    assert found["upstream"]["errors"][0] > NOTICEABLE
