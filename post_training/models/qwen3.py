"""Qwen3, dense: query and key are normed head by head, and no projection has a bias."""

from collections.abc import Iterator, Mapping
from typing import Any

from post_training.layouts.grouped_query import GroupedQueryShape, table
from post_training.layouts.layout import Table
from post_training.models.families import ModelFamily
from post_training.models.sentences import invalid, reject
from post_training.models.sizes import ModelSizes, grouped_attention_sizes


def _variants(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("attention_bias"):
        reason = "the Qwen3 layout needs attention_bias=False, as every published model has it"
        yield invalid("attention_bias", config["attention_bias"], reason, "Set actor_rollout_ref.model.path to one")


def _table(config: Mapping[str, Any]) -> Table:
    reject(_variants(config))
    return table(GroupedQueryShape.from_config(config, head_norms=True))


def _sizes(config: Mapping[str, Any]) -> ModelSizes:
    return grouped_attention_sizes(config, dense_layers=config["num_hidden_layers"])


def _published(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    """Values of https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json and of its siblings."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }


FAMILY = ModelFamily(
    name="Qwen3",
    architecture="Qwen3ForCausalLM",
    model_types=("qwen3",),
    table=_table,
    sizes=_sizes,
    positive=("num_key_value_heads", "head_dim"),
    variants=_variants,
    published={
        "qwen3-8b": _published(hidden=4096, intermediate=12288, layers=36, heads=32),
        "qwen3-32b": _published(hidden=5120, intermediate=25600, layers=64, heads=64),
    },
)
