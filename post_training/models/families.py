"""Which layout table describes a model. A new model is a new table and one line here."""

from collections.abc import Callable, Mapping
from typing import Any

from post_training.layouts.layout import Table
from post_training.models import deepseek_v3, qwen2

TABLES: Mapping[str, Callable[[Any], Table]] = {
    "DeepseekV3ForCausalLM": lambda config: deepseek_v3.table(deepseek_v3.DeepseekV3Shape.from_config(config)),
    "Qwen2ForCausalLM": lambda config: qwen2.table(qwen2.Qwen2Shape.from_config(config)),
}
"""By the first of the `architectures` in a config.json."""


def table_for(config: Any) -> Table:
    """The table of a model, from its transformers config or the mapping of its config.json.

    Raises ValueError for an architecture without a table, or for a variant that its table does not describe.
    """
    values = config if isinstance(config, Mapping) else config.to_dict()
    architecture = next(iter(values.get("architectures") or ()), None)
    if architecture is None or architecture not in TABLES:
        raise ValueError(f"no layout table describes architecture {architecture}; known are {', '.join(TABLES)}")
    return TABLES[architecture](values)
