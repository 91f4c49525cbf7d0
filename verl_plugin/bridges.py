"""Bridges with which mbridge 0.15.1 reads configurations of transformers 5, which keeps some of its keys elsewhere.

Bridges that derive from these work with Megatron-core's own layers and with MindSpeed's. The defects are in
docs/upstream/mbridge-transformers-5.md.
"""

from __future__ import annotations

from typing import Any

from mbridge.core import LLMBridge
from mbridge.models.deepseek_v3 import DeepseekV3Bridge

from verl_plugin.rotary import is_built, rotary_type

# YaRN keys that have the same names in Megatron-core and transformers.
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings")


class BridgeOfTransformers5(LLMBridge):
    """Reads a configuration of transformers 5, and gives Megatron-core 0.16 the arguments that it takes.

    Raises:
        ValueError: mbridge would build plain rotary embeddings for a model that scales them.
    """

    def __init__(self, hf_config: Any, *args: Any, **kwargs: Any) -> None:
        self.require_rotary_type(hf_config)
        _restore_rope_keys(hf_config)
        super().__init__(hf_config, *args, **kwargs)

    @staticmethod
    def require_rotary_type(hf_config: Any) -> None:
        """Raise ValueError for a type of rotary embeddings that is not built for this model."""
        found = rotary_type({"rope_parameters": getattr(hf_config, "rope_parameters", None)})
        if not is_built(hf_config.model_type, found):
            raise ValueError(
                f"config.json's rope_type={found} is invalid: mbridge builds plain rotary embeddings for it. "
                "Train with fsdp2."
            )

    def _build_base_config(self, **kwargs: Any) -> Any:
        # mbridge 0.15.1 uses an earlier name for this argument, which Megatron-core 0.16 rejects.
        if "max_position_embeddings" in kwargs:
            earlier = kwargs.pop("max_position_embeddings")
            kwargs.setdefault("original_max_position_embeddings", earlier)
        # Megatron-core does not take 0 MTP layers to mean none.
        if kwargs.get("mtp_num_layers") == 0:
            del kwargs["mtp_num_layers"]
        return super()._build_base_config(**kwargs)


class DeepseekV3OfTransformers5(BridgeOfTransformers5, DeepseekV3Bridge):
    """DeepSeek-V3, with what mbridge 0.15.1 leaves out beside transformers 5: YaRN, and groups of experts.

    mbridge looks for `rope_scaling` among the keys of the configuration, which transformers 5 keeps in
    `rope_parameters`, and builds plain rotary embeddings; and it lets a token choose among all groups of experts. Both
    are silent. Weights in float32 are read as they are: mbridge's own reader is for FP8 and bfloat16.
    """

    def _build_base_config(self, **kwargs: Any) -> Any:
        rope = getattr(self.hf_config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "yarn":
            kwargs |= {"rope_type": "yarn", "rotary_scaling_factor": rope["factor"]}
            kwargs |= {name: rope[name] for name in _YARN if name in rope}
        kwargs["moe_router_num_groups"] = self.hf_config.n_group
        kwargs["moe_router_group_topk"] = self.hf_config.topk_group
        return super()._build_base_config(**kwargs)

    def _get_safetensor_io(self, weights_path: str) -> Any:
        return LLMBridge._get_safetensor_io(self, weights_path)


def _restore_rope_keys(hf_config: Any) -> None:
    """Give a configuration of transformers 5, which has only `rope_parameters`, the keys that mbridge reads."""
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    if "rope_theta" in parameters and not hasattr(hf_config, "rope_theta"):
        hf_config.rope_theta = parameters["rope_theta"]
