"""The description of a model whose weights are dequantised while they are loaded."""

from typing import Any


def without_quantisation(config: Any) -> Any:
    """Take quantization_config off a transformers config, in place, and return it."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config
