"""Sizes of a model besides its weights, for plans and counts: widths that determine work, activations and caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VisionSizes:
    """Widths of a vision tower.

    Attributes:
        patch: pixel values of one patch.
        patches_per_token: patches that the merger combines into one image token.
        block: prefix of the HF names of its first block's tensors.
    """

    depth: int
    hidden: int
    intermediate: int
    heads: int
    patch: int
    patches_per_token: int
    block: str


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder and of its vision tower, if there is one. Widths are elements per token.

    Attributes:
        dense_layers: number of leading layers without experts.
        attention_weights: elements of the matrices of one layer's attention.
        score_width: widths of query and value together, of all heads.
        keys_values: width of the keys and values that training's attention operator takes, of all heads.
        kept_by_heads: width that the backward of attention needs besides the inputs of matrices, divided over
            tensor-parallel ranks.
        kept_whole: the same, on each of these ranks.
        cache_by_heads: width of the cache of a layer that is divided over tensor-parallel ranks.
        cache_whole: the same, on each of these ranks.
        cache_heads: most ranks over which the cache can be divided.
        rollout_attention: elements of a layer's weights that the rollout derives, of all heads.
        rotary: elements of the rollout's rotary tables.
        mla: whether the attention is multi-head latent attention.
        vision: the tower in front of the decoder, which all other sizes describe; None for a text-only model.
    """

    hidden: int
    vocabulary: int
    layers: int
    dense_layers: int
    intermediate: int
    attention_weights: int
    score_width: int
    keys_values: int
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
    vision: VisionSizes | None = None

    def cache(self, tp: int) -> int:
        """Return the elements that a token has in the cache of one layer, on one of `tp` ranks."""
        return self.cache_whole + self.cache_by_heads // min(tp, self.cache_heads)

    @property
    def weights_met(self) -> int:
        """Weights that one token is multiplied with: all except embeddings, and of experts only its own."""
        expert_layers = self.layers - self.dense_layers
        feed_forward = self.dense_layers * 3 * self.intermediate
        feed_forward += expert_layers * (self.experts + 3 * (self.expert_width * self.experts_per_token))
        feed_forward += expert_layers * 3 * self.shared_width
        return self.layers * self.attention_weights + self.hidden * (feed_forward + self.vocabulary)


def grouped_attention_sizes(config: Mapping[str, Any], dense_layers: int, **experts: int) -> ModelSizes:
    """Return the sizes of a model whose query heads share key and value heads in groups (GQA).

    Raises KeyError if config.json lacks a size.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    return ModelSizes(
        hidden=hidden,
        vocabulary=config["vocab_size"],
        layers=config["num_hidden_layers"],
        dense_layers=dense_layers,
        intermediate=config["intermediate_size"],
        attention_weights=hidden * width * (2 * heads + 2 * kv_heads),
        score_width=2 * heads * width,
        keys_values=2 * kv_heads * width,
        # Query, key, value and output of the operator, inputs of two rotations, and the operator's maxima and sums of
        # scores, 8 of each in float32.
        kept_by_heads=(3 * heads + 3 * kv_heads) * width + heads * 32,
        kept_whole=0,
        cache_by_heads=2 * kv_heads * width,
        cache_whole=0,
        cache_heads=kv_heads,
        rollout_attention=0,
        # One table of cosines and sines.
        rotary=config.get("max_position_embeddings", 0) * width,
        mla=False,
        vision=None,
        **experts,
    )
