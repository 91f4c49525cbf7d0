"""YaRN's frequencies and amplitude against transformers' function for the published configuration and for others."""

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from post_training.models.megatron.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding,
    attention_temperature,
    yarn_frequencies,
)

PUBLISHED = {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
TINY = {"factor": 4, "original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 0.5}
NARROW = {"factor": 8, "original_max_position_embeddings": 64, "beta_fast": 4, "mscale": 0.7, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(("width", "scaling"), [(64, PUBLISHED), (32, TINY), (16, NARROW)])
def test_frequencies_and_amplitude(width, scaling):
    scaling = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, **scaling}
    config = DeepseekV3Config(
        qk_rope_head_dim=width,
        head_dim=width,
        rope_theta=10000.0,
        max_position_embeddings=scaling["factor"] * scaling["original_max_position_embeddings"],
        rope_scaling=scaling,
    )
    expected, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    found = yarn_frequencies(
        width,
        10000.0,
        scaling["factor"],
        scaling["original_max_position_embeddings"],
        scaling["beta_fast"],
        scaling["beta_slow"],
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    ratio = attention_temperature(scaling["factor"], scaling["mscale"]) / attention_temperature(
        scaling["factor"], scaling["mscale_all_dim"]
    )
    assert ratio == pytest.approx(amplitude)


def test_angles_are_in_half_layout_and_start_at_zero():
    cosine, sine = YarnRotaryEmbedding(8, 10000.0)(torch.arange(5), torch.float32)
    assert cosine.shape == sine.shape == (5, 1, 8)
    torch.testing.assert_close(cosine[0], torch.ones(1, 8))
    torch.testing.assert_close(sine[..., :4], sine[..., 4:])
    torch.testing.assert_close(sine[3, 0, :4], (3 * 10000.0 ** (-2 * torch.arange(4) / 8)).sin())
