"""YaRN's frequencies and amplitude match transformers' function, for the published configuration and others."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


@given(
    width=st.sampled_from([8, 16, 64, 128]),
    base=st.sampled_from([100.0, 10000.0, 1e6]),
    factor=st.sampled_from([1.5, 4.0, 40.0]),
    context=st.sampled_from([16, 512, 4096, 32768, 1 << 20]),
    betas=st.sampled_from([(32.0, 1.0), (4.0, 1.0), (64.0, 0.25)]),
)
@settings(max_examples=400, deadline=None)
def test_bounds_beyond_the_planes_are_those_of_transformers(width, base, factor, context, betas):
    """Bounds outside the planes are clamped, as with short contexts (no plane is fast enough) and long ones (all are).

    If even the last plane is far too fast, transformers' ramp runs backwards, while the paper keeps all frequencies.
    """
    scaling = {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context, "beta_fast": betas[0],
        "beta_slow": betas[1],
    }  # fmt: skip
    config = DeepseekV3Config(
        qk_rope_head_dim=width, head_dim=width, rope_theta=base, max_position_embeddings=int(factor * context),
        rope_scaling=scaling,
    )  # fmt: skip
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    if width * math.log(context / (2 * math.pi * betas[0])) / (2 * math.log(base)) >= width - 1:
        expected = base ** (-2 * torch.arange(width // 2) / width)
    found = yarn_frequencies(width, base, factor, context, *betas)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)


def test_angles_are_in_half_layout_and_start_at_zero():
    cosine, sine = YarnRotaryEmbedding(8, 10000.0)(torch.arange(5), torch.float32)
    assert cosine.shape == sine.shape == (5, 1, 8)
    torch.testing.assert_close(cosine[0], torch.ones(1, 8))
    torch.testing.assert_close(sine[..., :4], sine[..., 4:])
    torch.testing.assert_close(sine[3, 0, :4], (3 * 10000.0 ** (-2 * torch.arange(4) / 8)).sin())
