"""What a plan has to know of a model besides its weights: the widths that decide activations, caches and buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelSizes:
    """Widths are elements a token; `kept_*` is what the backward of an attention needs beside inputs of matrices.

    kept_by_heads, cache_by_heads: divided over tensor-parallel ranks. kept_whole, cache_whole: on each of them.
    cache_heads: the heads that the cache is divided by, at most. dense_layers: how many layers, the first ones, have
    no experts. rollout_attention: elements of weights that the rollout derives, of all heads and a layer. rotary:
    elements of the rollout's rotary tables. mla: whether the attention is multi-head latent attention.
    """

    hidden: int
    vocabulary: int
    layers: int
    dense_layers: int
    intermediate: int
    kept_by_heads: int
    kept_whole: int
    cache_by_heads: int
    cache_whole: int
    cache_heads: int
    rollout_attention: int
    rotary: int
    mla: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0

    def cache(self, tp: int) -> int:
        """Elements that a token has in the cache of one layer, on one of `tp` ranks."""
        return self.cache_whole + self.cache_by_heads // min(tp, self.cache_heads or 1)


def sizes_of(config: Mapping[str, Any]) -> ModelSizes:
    """The sizes of the model that a config.json describes. ValueError for a model without them."""
    architecture = next(iter(config.get("architectures") or ()), "")
    if architecture not in SIZES:
        raise ValueError(f"no plan can be made of {architecture}; one can of {', '.join(SIZES)}")
    try:
        return SIZES[architecture](config)
    except KeyError as missing:
        raise ValueError(f"the config.json of {architecture} lacks {missing}") from missing


def _deepseek_v3(config: Mapping[str, Any]) -> ModelSizes:
    nope, rope, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
    scaling = config.get("rope_scaling") or {}
    context = int(scaling.get("original_max_position_embeddings", 0) * scaling.get("factor", 1))
    width = config["moe_intermediate_size"]
    return ModelSizes(
        hidden=config["hidden_size"],
        vocabulary=config["vocab_size"],
        layers=config["num_hidden_layers"],
        dense_layers=config.get("first_k_dense_replace", 0),
        intermediate=config["intermediate_size"],
        # Query, key, value and output of the operator, the input of the query's rotation, and the operator's largest
        # scores and sums, which are 8 of each and in float32.
        kept_by_heads=heads * (2 * (nope + rope) + 2 * value + rope + 32),
        kept_whole=(config.get("q_lora_rank") or 0) + latent + rope,
        cache_by_heads=0,
        cache_whole=latent + rope,
        cache_heads=0,
        rollout_attention=heads * latent * (nope + value),
        # Three tables of the model's context, which all layers share.
        rotary=3 * context * rope,
        mla=True,
        experts=config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_width=width,
        shared_width=width * (config.get("n_shared_experts") or 0),
    )


def _qwen2(config: Mapping[str, Any]) -> ModelSizes:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or config["hidden_size"] // heads
    return ModelSizes(
        hidden=config["hidden_size"],
        vocabulary=config["vocab_size"],
        layers=config["num_hidden_layers"],
        dense_layers=config["num_hidden_layers"],
        intermediate=config["intermediate_size"],
        # Query, key, value and output of the operator, inputs of two rotations, and largest scores and sums as above.
        kept_by_heads=(3 * heads + 3 * kv_heads) * width + heads * 32,
        kept_whole=0,
        cache_by_heads=2 * kv_heads * width,
        cache_whole=0,
        cache_heads=kv_heads,
        rollout_attention=0,
        # One table of cosines and sines.
        rotary=config.get("max_position_embeddings", 0) * width,
        mla=False,
    )


SIZES: Mapping[str, Callable[[Mapping[str, Any]], ModelSizes]] = {
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Qwen2ForCausalLM": _qwen2,
}
"""By the first of the `architectures` in a config.json; every model with a layout table has an entry here."""
