"""verl's FSDP worker on images: log-probs, positions and weights of rollout and training match transformers'."""

import json

import pytest

from rehearsal.image_task import write_image_task
from rehearsal.plan import DEFAULT_TRAIN_DATA
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from tests.forked import FSDP
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow
RANKS, STEPS, ROWS = 2, 2, 8


def overrides(folder):
    """Return overrides: two answers to each of four prompts per step, on two ranks that serve one model."""
    node = "actor_rollout_ref"
    return [
        f"{node}.model.path={folder / 'model'}", f"{node}.overlay.measure.output_dir={folder / 'run'}",
        f"{node}.overlay.precision=float32", f"{node}.rollout.n=2", "data.train_batch_size=4",
        f"trainer.n_gpus_per_node={RANKS}", f"{node}.rollout.tensor_model_parallel_size={RANKS}",
        f"{node}.actor.ppo_micro_batch_size_per_gpu=2", f"{node}.rollout.log_prob_micro_batch_size_per_gpu=4",
        f"{node}.ref.log_prob_micro_batch_size_per_gpu=4",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worker")
    request = CheckpointRequest(DEFAULT_TRAIN_DATA, 0, "float32", None, "qwen2_5_vl")
    make_checkpoint(request, folder / "model", lambda step, loss: None)
    write_image_task(folder / "data", 1, 32)
    (folder / "run").mkdir()
    (folder / "request.json").write_text(json.dumps({"overrides": overrides(folder)}))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NPU_EMULATOR_DEVICES", str(RANKS))
        environment.setenv("NPU_EMULATOR_CAPACITY_MB", "1024")
        environment.setenv("OMP_NUM_THREADS", "1")
        run_ranks("tests.verl_patches.workers.image_worker_program", RANKS, folder, imported=FSDP)
    return [json.loads((folder / f"found.{rank}.json").read_text()) for rank in range(RANKS)]


def test_log_probs_of_images_equal_transformers(found):
    for step in (step for rank in found for step in rank):
        assert 0 < step["worst"] < 1e-5 and 0 < step["reported"] < 1e-5


def test_positions_of_images_equal_transformers(found):
    assert [[step["right"] for step in rank] for rank in found] == [[ROWS // RANKS] * STEPS] * RANKS


def test_rollout_serves_the_bytes_of_training(found):
    assert [[step["differing"] for step in rank] for rank in found] == [[[]] * STEPS] * RANKS


def test_update_moves_every_weight(found):
    for step in (step for rank in found for step in rank):
        assert len(step["moved"]) == step["all"] > 50 and step["grad_norm"] > 0
