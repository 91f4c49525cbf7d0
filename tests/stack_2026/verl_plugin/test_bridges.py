"""Bridges reject rotary embeddings that mbridge would build without their scaling."""

from __future__ import annotations

import pytest
from transformers import DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "scaling", "passes"),
    [
        (Qwen3Config, None, True),
        (Qwen3MoeConfig, {"rope_type": "default", "rope_theta": 1e6}, True),
        (DeepseekV3Config, YARN, True),
        (DeepseekV3Config, LINEAR, False),
        (Qwen3Config, YARN, False),
        (Qwen3MoeConfig, LINEAR, False),
    ],
)
def test_scaling_that_is_not_built_is_rejected(family, scaling, passes):
    from verl_plugin.bridges import BridgeOfTransformers5

    config = family(**({} if scaling is None else {"rope_parameters": scaling}))
    if passes:
        BridgeOfTransformers5.require_rotary_type(config)
    else:
        with pytest.raises(ValueError, match=f"rope_type={scaling['rope_type']} is invalid: mbridge builds plain"):
            BridgeOfTransformers5.require_rotary_type(config)
