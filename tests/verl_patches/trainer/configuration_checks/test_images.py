"""What a job with images needs of its configuration."""

import pytest

from overlay import ConfigurationError
from tests.post_training.models.published_configs import PUBLISHED_CONFIGS
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose

MODEL = "actor_rollout_ref.model.path=/models/one"


@pytest.mark.parametrize("how", ["left", "right", "middle"])
def test_truncated_image_prompts_rejected(how):
    config = compose("qwen2_5_vl_7b_geo3k", [MODEL, f"data.truncation={how}"])
    with pytest.raises(ConfigurationError, match=f"^data.truncation={how} is invalid: .*Set it to error"):
        check_configuration(config, PUBLISHED_CONFIGS["Qwen/Qwen2.5-VL-7B-Instruct"])


def test_truncated_text_prompts_accepted():
    config = compose("qwen2_5_0_5b_gsm8k", [MODEL, "data.truncation=left"])
    check_configuration(config, PUBLISHED_CONFIGS["Qwen/Qwen2.5-0.5B-Instruct"])
    check_configuration(config)
