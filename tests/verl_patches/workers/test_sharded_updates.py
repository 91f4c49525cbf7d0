"""Two steps of verl's FSDP workers in float32: FSDP1 and FSDP2, on one die and on two, which may share sequences with
Ulysses, give the same gradients."""

from __future__ import annotations

import json
from itertools import product

import pytest

from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from tests.forked import FSDP
from tests.post_training.plan.test_fsdp import DATA, ONE_CARD, STEP
from tests.ranks import run_ranks
from tests.worker_processes.processes import VENDOR_ENVIRONMENT

pytestmark = pytest.mark.slow
PROGRAM = "tests.verl_patches.workers.sharded_update_program"
ACTOR = "actor_rollout_ref.actor"
FSDP2 = f"{ACTOR}.strategy=fsdp2"
AWAY = [f"{ACTOR}.fsdp_config.{name}_offload=true" for name in ("param", "optimizer")]
# By name: overrides, and the number of answers without an advantage.
JOBS = {"fsdp": ([], 0), "fsdp2": ([FSDP2], 0), "fsdp2 away": ([FSDP2, *AWAY], 0)}
LESS = {"one answer less": ([], 1)}
UNPADDED = ["actor_rollout_ref.model.use_remove_padding=true"]
SHARED = [*UNPADDED, f"{ACTOR}.ulysses_sequence_parallel_size=2"]
DYNAMIC = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=128"]
ULYSSES = {"unpadded": (UNPADDED, 0), "ulysses": (SHARED, 0), "fsdp2 ulysses": ([FSDP2, *SHARED, *DYNAMIC], 0)}
WRONG = {"positions not cut": (SHARED, 0)}
DIES = (1, 2)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return the results of each rank, by number of dies."""
    folder = tmp_path_factory.mktemp("updates")
    request = CheckpointRequest(DATA, 0, "float32", model_type="qwen2", warm_start=None)
    make_checkpoint(request, folder / "model", lambda step, loss: None)
    overrides = [
        *STEP, f"actor_rollout_ref.model.path={folder}/model", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
        f"actor_rollout_ref.overlay.measure.output_dir={folder}", "actor_rollout_ref.overlay.precision=float32",
    ]  # fmt: skip
    found = {}
    for dies in DIES:
        run = {"configuration": ONE_CARD, "overrides": [*overrides, f"trainer.n_gpus_per_node={dies}"]}
        run["jobs"] = JOBS | (LESS if dies == 1 else ULYSSES | WRONG)
        (folder / "request.json").write_text(json.dumps(run))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (VENDOR_ENVIRONMENT | {"LOCAL_WORLD_SIZE": str(dies)}).items():
                patch.setenv(name, value)
            run_ranks(PROGRAM, dies, folder, 400, imported=FSDP)
        found[dies] = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(dies)]
    return found


def differences(found, expected):
    return [abs(value / other - 1) for value, other in zip(found, expected, strict=True)]


def test_every_strategy_and_number_of_dies_has_the_same_gradient_norm(measured):
    """The norm that verl reports is rounded in the device's float32; the gradients themselves are closer."""
    expected = measured[1][0]["fsdp"]
    for dies, name in [*product(DIES, JOBS), *((2, name) for name in ULYSSES)]:
        for rank in measured[dies]:
            found = rank[name]
            norms, exact = (differences(found[key], expected[key]) for key in ("norms", "exact_norms"))
            print(dies, name, [f"{difference:.1e}" for difference in (*norms, *exact)])
            assert max(norms) < 1e-5 and max(exact) < 1e-6, (dies, name, norms, exact)
            assert found["log_probs"] == pytest.approx(expected["log_probs"], rel=1e-6)
            assert found["version"] == (2 if "fsdp2" in name else 1)


def test_positions_that_are_not_cut_are_noticed(measured):
    for rank in measured[2]:
        assert differences(rank["positions not cut"]["norms"], measured[1][0]["fsdp"]["norms"])[0] > 1e-3


def test_one_answer_less_has_another(measured):
    other, whole = (measured[1][0][name] for name in ("one answer less", "fsdp"))
    assert all(differences(other[key][:1], whole[key][:1])[0] > 1e-3 for key in ("norms", "exact_norms"))


def test_nothing_stays_gathered_after_the_log_probs(measured):
    for dies in DIES:
        for rank in measured[dies]:
            more = rank["fsdp2"]["left"] - rank["fsdp"]["left"]
            assert more < rank["fsdp2"]["gathered"] / 10 and rank["fsdp2"]["gathered"] > 0, rank["fsdp2"]


def test_weights_that_are_moved_leave_the_die(measured):
    """The last number is what verl's own function moves."""
    for dies in DIES:
        for rank in measured[dies]:
            weights, left, came, upstream = rank["fsdp2"]["moves"]
            assert left >= weights and came >= weights and upstream < weights / 10, rank["fsdp2"]["moves"]
