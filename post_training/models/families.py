"""What the rest of the project knows of a family of models, and which family a model belongs to.

Each module of this folder that has a FAMILY is one family; nothing else names it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from post_training.layouts.layout import Table
from post_training.models.sizes import ModelSizes


@dataclass(frozen=True)
class MegatronModel:
    """How Megatron builds a family with this project's modules; both functions import Megatron when they are called.

    config: (hf_config, dtype, **overrides of the transformer's configuration) -> that configuration.
    build: (configuration, hf_config, pre_process, post_process, freeze_moe_router=...) -> one pipeline stage.
    rotary: kinds of `rope_scaling` that it computes, "default" being none.
    """

    config: Callable[..., Any]
    build: Callable[..., Any]
    rotary: frozenset[str] = frozenset({"default"})


@dataclass(frozen=True)
class MindspeedModel:
    """How MindSpeed-LLM builds it. arguments: hf_config -> those of its options that describe the model, which raises
    ValueError for one that it cannot represent. config: completes Megatron's configuration. build: as of Megatron."""

    arguments: Callable[[Any], dict[str, Any]]
    config: Callable[[Any], Any]
    build: Callable[..., Any]


@dataclass(frozen=True)
class ModelFamily:
    """Everything that differs between families; a part that a family lacks is refused by the part that needs it.

    name: as its authors write it. architecture: the one in its config.json. model_types: of config.json; further ones
    are those whose sizes are the same. table, sizes: of the values of a config.json; ValueError for a variant that they
    do not describe, KeyError where one is missing. published: values of config.json by the name that a user types, as
    far as layouts need them. megatron: None where verl's own model is trained. shards: of the values of a config.json,
    what the forms of MindSpeed-LLM's shards are derived from; None where there are none. balances_router: whether its
    experts can be dealt out by force. rollout_graphs: the graphs in which vLLM-Ascend decodes it.
    """

    name: str
    architecture: str
    model_types: tuple[str, ...]
    table: Callable[[Mapping[str, Any]], Table]
    sizes: Callable[[Mapping[str, Any]], ModelSizes]
    shards: Callable[[Mapping[str, Any]], Any] | None = None
    megatron: MegatronModel | None = None
    mindspeed: MindspeedModel | None = None
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    balances_router: bool = False
    rollout_graphs: Literal["acl", "torchair"] = "acl"


@cache
def families() -> tuple[ModelFamily, ...]:
    """All families, by the names of their modules."""
    modules = (
        importlib.import_module(f"{__package__}.{each.name}")
        for each in pkgutil.iter_modules([str(Path(__file__).parent)])
        if not each.ispkg
    )
    return tuple(module.FAMILY for module in modules if hasattr(module, "FAMILY"))


def find_family(config: Any) -> ModelFamily | None:
    """The family of a model, from its transformers config or the mapping of its config.json; None if it has none.

    The first of `architectures` decides, and `model_type` where there are none.
    """
    architecture = _architecture(config)
    for family in families():
        if architecture == family.architecture if architecture else _field(config, "model_type") in family.model_types:
            return family
    return None


def family_of(config: Any) -> ModelFamily:
    """The same. Raises ValueError for a model without a family."""
    family = find_family(config)
    if family is None:
        known = ", ".join(each.architecture for each in families())
        raise ValueError(f"no layout table describes architecture {_architecture(config)}; known are {known}")
    return family


def _architecture(config: Any) -> str | None:
    return next(iter(_field(config, "architectures") or ()), None)


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def table_for(config: Any) -> Table:
    """The table of a model, from its transformers config or the mapping of its config.json.

    Raises ValueError for an architecture without a table, or for a variant that its table does not describe.
    """
    return family_of(config).table(config if isinstance(config, Mapping) else config.to_dict())


def shard_shape_of(config: Mapping[str, Any]) -> Any:
    """What the forms of a model's shards are derived from. Raises ValueError for a family without shards."""
    family = family_of(config)
    if family.shards is None:
        known = " and ".join(each.name for each in families() if each.shards)
        raise ValueError(
            f"shards are made of {known}, and this model is {family.name}: training reads its HuggingFace folder "
            "directly, and export_hf.py writes one from what was trained"
        )
    return family.shards(config)


def sizes_of(config: Mapping[str, Any]) -> ModelSizes:
    """The sizes of the model that a config.json describes. ValueError for a model without them."""
    family = family_of(config)
    try:
        return family.sizes(config)
    except KeyError as missing:
        raise ValueError(f"the config.json of {family.architecture} lacks {missing}") from missing
