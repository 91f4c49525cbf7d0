"""Qwen2.5: dense, with bias on q, k and v."""

from collections.abc import Mapping
from typing import Any

from post_training.layouts.grouped_query import GroupedQueryShape, table
from post_training.layouts.layout import Table
from post_training.models.families import ModelFamily
from post_training.models.sizes import ModelSizes, grouped_attention_sizes


def _table(config: Mapping[str, Any]) -> Table:
    return table(GroupedQueryShape.from_config(config, bias=True))


def _sizes(config: Mapping[str, Any]) -> ModelSizes:
    return grouped_attention_sizes(config, dense_layers=config["num_hidden_layers"])


FAMILY = ModelFamily(
    name="Qwen2.5",
    architecture="Qwen2ForCausalLM",
    model_types=("qwen2",),
    table=_table,
    sizes=_sizes,
    positive=("num_key_value_heads",),
    published={
        "qwen2.5-0.5b": {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        }
    },
)
