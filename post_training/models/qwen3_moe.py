"""Qwen3-MoE: the attention of Qwen3, and in every layer experts chosen by a softmax over all of them."""

from collections.abc import Iterator, Mapping
from typing import Any

from post_training.layouts.grouped_query import GroupedQueryShape, table
from post_training.layouts.layout import Table
from post_training.models.families import MegatronModel, ModelFamily, variant_findings
from post_training.models.sentences import invalid, reject
from post_training.models.sizes import ModelSizes, grouped_attention_sizes

_AS_PUBLISHED = {"mlp_only_layers": [], "decoder_sparse_step": 1, "attention_bias": False}


def _layout_variants(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in _AS_PUBLISHED.items():
        if (config.get(key) or value) != value:
            reason = (
                "the Qwen3-MoE layout needs experts in every layer (mlp_only_layers=[], decoder_sparse_step=1) and "
                "attention_bias=False, as every published model has them"
            )
            yield invalid(key, config[key], reason, "Set actor_rollout_ref.model.path to one")


def _variants(config: Mapping[str, Any]) -> Iterator[str]:
    yield from _layout_variants(config)
    if config.get("tie_word_embeddings"):
        reason = "embedding and output layer of a Qwen3-MoE have separate weights"
        yield invalid("tie_word_embeddings", True, reason, "Set actor_rollout_ref.model.path to a published model")


def _table(config: Mapping[str, Any]) -> Table:
    reject(_layout_variants(config))
    return table(
        GroupedQueryShape.from_config(
            config, head_norms=True, experts=config["num_experts"], expert_width=config["moe_intermediate_size"]
        )
    )


def _sizes(config: Mapping[str, Any]) -> ModelSizes:
    return grouped_attention_sizes(
        config,
        dense_layers=0,
        experts=config["num_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_width=config["moe_intermediate_size"],
    )


def _megatron_config(hf_config: Any, *args: Any, **overrides: Any) -> Any:
    from post_training.models.megatron.qwen3_moe_model import qwen3_moe_config

    reject(variant_findings(FAMILY, hf_config.to_dict()))
    return qwen3_moe_config(hf_config, *args, **overrides)


def _megatron_model(*args: Any, **options: Any) -> Any:
    from post_training.models.megatron.qwen3_moe_model import build_qwen3_moe

    return build_qwen3_moe(*args, **options)


def _published(hidden: int, width: int, layers: int, heads: int) -> dict[str, Any]:
    """Values of https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json and of its sibling."""
    return {
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "moe_intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }


FAMILY = ModelFamily(
    name="Qwen3-MoE",
    architecture="Qwen3MoeForCausalLM",
    model_types=("qwen3_moe",),
    table=_table,
    sizes=_sizes,
    megatron=MegatronModel(_megatron_config, _megatron_model),
    positive=("num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    variants=_variants,
    published={
        "qwen3-30b-a3b": _published(hidden=2048, width=768, layers=48, heads=32),
        "qwen3-235b-a22b": _published(hidden=4096, width=1536, layers=94, heads=64),
    },
)
