"""The requirements of a job with images on its configuration."""

import pytest

from overlay import ConfigurationError
from tests.post_training.models.published_configs import PUBLISHED_CONFIGS
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.configuration_checks.images import check_micro_batches
from verl_patches.trainer.main_ppo import compose

MODEL = "actor_rollout_ref.model.path=/models/one"


@pytest.mark.parametrize("how", ["left", "right", "middle"])
def test_truncated_image_prompts_rejected(how):
    config = compose("qwen2_5_vl_7b_geo3k", [MODEL, f"data.truncation={how}"])
    with pytest.raises(ConfigurationError, match=f"^data.truncation={how} is invalid: .*Set it to error"):
        check_configuration(config, PUBLISHED_CONFIGS["Qwen/Qwen2.5-VL-7B-Instruct"])


@pytest.mark.parametrize("group", ["rollout", "ref"])
@pytest.mark.parametrize(("rows", "micro"), [(250, 50), (256, 160)])
def test_uneven_micro_batches_of_images_rejected(group, rows, micro):
    """A die has half of the rows: 125 rows do not divide into two equal parts, and 128 do not fill one of 160."""
    key = f"actor_rollout_ref.{group}.log_prob_micro_batch_size_per_gpu"
    config = {
        "data": {"train_batch_size": rows // 2},
        "trainer": {"n_gpus_per_node": 2, "nnodes": 1},
        "actor_rollout_ref": {
            name: {"n": 2, "log_prob_micro_batch_size_per_gpu": micro if name == group else 1}
            for name in ("rollout", "ref")
        },
    }
    with pytest.raises(ConfigurationError, match=f"^{key}={micro} is invalid: .*Set it to a divisor of"):
        check_micro_batches(config, PUBLISHED_CONFIGS["Qwen/Qwen2.5-VL-7B-Instruct"])
    check_micro_batches(config, PUBLISHED_CONFIGS["Qwen/Qwen2.5-0.5B-Instruct"])


def test_truncated_text_prompts_accepted():
    config = compose("qwen2_5_0_5b_gsm8k", [MODEL, "data.truncation=left"])
    check_configuration(config, PUBLISHED_CONFIGS["Qwen/Qwen2.5-0.5B-Instruct"])
    check_configuration(config)
