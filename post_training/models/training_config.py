"""Make the config.json of a model that is trained and served in bfloat16 from the published one.

Published files of large models describe how their weights are stored: in FP8, with layers that predict further tokens
(multi-token prediction). Neither is trained here, but both transformers and vLLM would act on these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QUANTIZATION = ("quantization_config", "compression_config")
# By family: DeepSeek-V3, GLM-4.5, Kimi-K2 and MiMo; ERNIE and MiniMax.
PREDICTED_FURTHER = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")


def training_config(published: Mapping[str, Any]) -> dict[str, Any]:
    """Return a published configuration without quantisation and without layers of multi-token prediction.

    Nested groups, such as the text_config of a model with images, are treated alike. Other values stay, in their order.
    """
    made: dict[str, Any] = {}
    for name, value in published.items():
        if name in QUANTIZATION:
            continue
        if name in PREDICTED_FURTHER:
            made[name] = 0
        elif isinstance(value, Mapping) and name.endswith("_config"):
            made[name] = training_config(value)
        else:
            made[name] = value
    return made
