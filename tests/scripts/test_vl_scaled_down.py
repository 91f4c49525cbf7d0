"""The scaled-down jobs of Qwen2.5-VL: their composition, and images in place of arithmetic."""

import pyarrow.parquet
import pytest

from rehearsal.jobs import JOBS, scale_of
from scripts import preflight, prove_resume
from tests.post_training.models.published_configs import PUBLISHED_CONFIGS
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose

VL = PUBLISHED_CONFIGS["Qwen/Qwen2.5-VL-7B-Instruct"]
MODEL = "actor_rollout_ref.model.path=/models/tiny"


@pytest.mark.parametrize("dies", [2, 8])
@pytest.mark.parametrize("name", ["qwen2_5_vl_3b_geo3k_one_card", "qwen2_5_vl_7b_geo3k", "qwen2_5_vl_32b_geo3k"])
def test_scaled_job_passes_its_checks(name, dies):
    settings = JOBS[name].settings if name in JOBS else (scale_of(name).setting,)
    own = [*settings, "ray_init.address=local", MODEL, f"trainer.n_gpus_per_node={dies}"]
    config = compose(name, own)
    check_configuration(config, VL)
    assert config.trainer.nnodes == 1 and config.data.image_key == "images"
    # verl cuts rows with images into equal micro batches.
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n // dies
    assert rows % config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu == 0


def test_switches_of_a_scaled_job_stay():
    whole, scaled = (compose("qwen2_5_vl_7b_geo3k", [MODEL, *more]) for more in ((), ("+scale=emulated_qwen2_5_vl",)))
    for key in ("use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coeff", "strategy"):
        assert scaled.actor_rollout_ref.actor[key] == whole.actor_rollout_ref.actor[key]
    for key in ("enforce_eager", "free_cache_engine", "temperature"):
        assert scaled.actor_rollout_ref.rollout[key] == whole.actor_rollout_ref.rollout[key]


def test_proof_of_a_resume_trains_on_images(tmp_path):
    prove_resume._draw_data(tmp_path, 16)
    table = pyarrow.parquet.read_table(tmp_path / "train.parquet")
    assert table.num_rows == 16 and "images" in table.column_names
    before = (tmp_path / "train.parquet").stat().st_mtime_ns
    prove_resume._draw_data(tmp_path, 16)
    assert (tmp_path / "train.parquet").stat().st_mtime_ns == before
    prove_resume._draw_data(tmp_path, 24)
    assert pyarrow.parquet.read_table(tmp_path / "train.parquet").num_rows == 24


@pytest.mark.parametrize(
    ("name", "images"), [("qwen2_5_vl_32b_geo3k", True), ("qwen2_5_vl_7b_geo3k", True), ("qwen2_5_32b_dapo", False)]
)
def test_preflight_knows_models_with_images(name, images):
    assert preflight._reads_images(preflight._options(["--config-name", name])) == images
