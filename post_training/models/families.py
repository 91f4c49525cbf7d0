"""What the rest of the project knows of a family of models, and which family a model belongs to.

Each module of this folder that has a FAMILY is one family; nothing else names it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from post_training.layouts.layout import Table
from post_training.models.sentences import invalid
from post_training.models.sizes import ModelSizes

Description = TypeVar("Description")

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
# What verl's own builder of Megatron models scales positions by.
_VERL_ROTARY = frozenset({"default", "linear"})
TEXT_CONFIG = "text_config"
_ANOTHER = "Set actor_rollout_ref.model.path to another model"


def _no_variants(config: Mapping[str, Any]) -> Iterator[str]:
    """All models of the family are described."""
    yield from ()


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
    """Everything that differs between families; a part that a family lacks is rejected by the part that needs it.

    name: as its authors write it. architecture: the one in its config.json. model_types: of config.json; further ones
    are those whose sizes are the same. table, sizes: of the values of a config.json; ValueError for a variant that they
    do not describe, KeyError where one is missing. published: values of config.json by the name that a user types, as
    far as layouts need them. megatron: None where verl's own model is trained. shards: of the values of a config.json,
    what the forms of MindSpeed-LLM's shards are derived from; None where there are none. balances_router: whether its
    experts can be dealt out by force. rollout_graphs: the graphs in which vLLM-Ascend decodes it.
    positive: values of config.json beside those of every model that must be integers above 0. variants: of the values
    of a config.json, a sentence for each one that this project cannot train. trained_with: verl's back-ends that have
    the model. reads_images: whether prompts may hold images, for which its folder has a processor. Functions of a
    config.json get it as `decoder_values` returns it.
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
    positive: tuple[str, ...] = ()
    variants: Callable[[Mapping[str, Any]], Iterator[str]] = _no_variants
    trained_with: tuple[Literal["megatron", "fsdp"], ...] = ("megatron", "fsdp")
    reads_images: bool = False

    @property
    def rotary(self) -> frozenset[str]:
        """The kinds of rope_scaling that the family's Megatron model computes, "default" being none."""
        return _VERL_ROTARY if self.megatron is None else self.megatron.rotary


# Beyond them, what is computed of a model takes hours or more memory than there is.
_SIZE_RANGES: Mapping[str, tuple[int, int]] = {
    "hidden_size": (1, 1 << 20),
    "vocab_size": (1, 1 << 24),
    "num_hidden_layers": (1, 1 << 12),
    "intermediate_size": (1, 1 << 24),
    "moe_intermediate_size": (1, 1 << 24),
    "shared_expert_intermediate_size": (0, 1 << 24),
    "num_attention_heads": (1, 1 << 14),
    "num_key_value_heads": (1, 1 << 14),
    "head_dim": (1, 1 << 16),
    "q_lora_rank": (1, 1 << 20),
    "kv_lora_rank": (1, 1 << 20),
    "qk_nope_head_dim": (1, 1 << 16),
    "qk_rope_head_dim": (1, 1 << 16),
    "v_head_dim": (1, 1 << 16),
    "n_routed_experts": (0, 1 << 14),
    "num_experts": (0, 1 << 14),
    "num_experts_per_tok": (0, 1 << 14),
    "n_shared_experts": (0, 1 << 10),
    "first_k_dense_replace": (0, 1 << 12),
    "num_nextn_predict_layers": (0, 1 << 8),
}


_REQUIRED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")


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
        raise ValueError(unknown_architecture(config))
    return family


def unknown_architecture(config: Any) -> str:
    """The sentence for a model without a family, with the architectures that have one."""
    known = ", ".join(each.architecture for each in families())
    return invalid(
        "architectures",
        _field(config, "architectures") or [],
        f"no layout table describes architecture {_architecture(config)}; known are {known}",
        "Set actor_rollout_ref.model.path to a model of one of these",
    )


def variant_findings(family: ModelFamily, config: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each value of a config.json with which this project cannot train the model, whatever the job.

    Training and rollout both compute in bfloat16 or float32, without dropout, and every token sees all earlier ones.
    """
    yield from family.variants(config)
    for key in (*_SIZES, *family.positive):
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield invalid(key, value, f"every {family.name} has an integer above 0 there", "Copy the file again")
    if config.get("quantization_config"):
        reason = "the checkpoint is quantised, and training and rollout compute in bfloat16"
        remedy = (
            "Remove quantization_config and give bf16 weights: scripts/fp8_cast_bf16.py makes them of FP8, and "
            "actor_rollout_ref.actor.megatron.load_from_hf reads FP8 as it is"
        )
        yield invalid("quantization_config", config["quantization_config"], reason, remedy)
    if config.get("use_sliding_window"):
        reason = "vLLM supports no sliding window for some but all layers, and Megatron none at all"
        yield invalid("use_sliding_window", True, reason, f"{_ANOTHER}, or set it to false if it was trained without")
    if config.get("dual_chunk_attention_config"):
        reason = "the rollout on the NPU has no dual chunk attention, and training none either"
        remedy = "Remove dual_chunk_attention_config for sequences within original_max_position_embeddings"
        yield invalid("dual_chunk_attention_config", config["dual_chunk_attention_config"], reason, remedy)
    if config.get("hidden_act", "silu") != "silu":
        yield invalid("hidden_act", config["hidden_act"], "the models are built with silu", _ANOTHER)
    if config.get("attention_dropout"):
        reason = "attention on the NPU has no dropout, and the rollout none either"
        yield invalid("attention_dropout", config["attention_dropout"], reason, "Set attention_dropout to 0.0")


def decoder_values(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of a config.json with those of the decoder at its top, as models of text have them.

    Published files of models with images have them there. What transformers 4.52 or later writes has them in
    `text_config` (and perhaps at the top too), of which transformers and vLLM then read that one alone.
    """
    nested = config.get(TEXT_CONFIG)
    if not isinstance(nested, Mapping):
        return config
    own = {name: config[name] for name in ("architectures", "model_type") if name in config}
    return {name: value for name, value in {**config, **nested, **own}.items() if name != TEXT_CONFIG}


def _architecture(config: Any) -> str | None:
    named = _field(config, "architectures")
    return next(iter(named), None) if isinstance(named, list | tuple) else None


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def table_for(config: Any) -> Table:
    """The table of a model, from its transformers config or the mapping of its config.json.

    Raises ValueError for an architecture without a table, or for a variant that its table does not describe.
    """
    family = family_of(config)
    return _described(family, family.table, config if isinstance(config, Mapping) else config_values(config))


def config_values(config: Any) -> dict[str, Any]:
    """A transformers config as its config.json was published: transformers 5 calls `num_experts` num_local_experts."""
    values = config.to_dict()
    aliases = getattr(config, "attribute_map", {})
    return {name: values[own] for name, own in aliases.items() if own in values} | values


def shard_shape_of(config: Mapping[str, Any]) -> Any:
    """What the forms of a model's shards are derived from. Raises ValueError for a family without shards."""
    family = family_of(config)
    if family.shards is None:
        known = " and ".join(each.name for each in families() if each.shards)
        raise ValueError(
            f"shards are made of {known}, and this model is {family.name}: training reads its HuggingFace folder "
            "directly, and export_hf.py writes one from what was trained"
        )
    return _described(family, family.shards, config)


def check_sizes(config: Mapping[str, Any]) -> None:
    """Check that the sizes of a config.json are whole numbers that a model can have; null: the part is absent.

    Raises:
        ValueError: one is not; one sentence.
    """
    for key, (least, most) in _SIZE_RANGES.items():
        value = config.get(key)
        is_given = value is not None or (key in _REQUIRED and key in config)
        if is_given and (type(value) is not int or not least <= value <= most):
            shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
            raise ValueError(
                f"config.json: {key}={shown} is invalid: no model has it. Set it to a number from {least} to {most}"
            )


def sizes_of(config: Mapping[str, Any]) -> ModelSizes:
    """The sizes of the model that a config.json describes. ValueError for a model without them."""
    family = family_of(config)
    return _described(family, family.sizes, config)


def _described(
    family: ModelFamily, describe: Callable[[Mapping[str, Any]], Description], config: Mapping[str, Any]
) -> Description:
    """Apply `describe` to a config.json. Raises ValueError for sizes that are wrong or missing."""
    values = decoder_values(config)
    check_sizes(values)
    try:
        return describe(values)
    except KeyError as missing:
        raise ValueError(f"the config.json of {family.architecture} lacks {missing}") from missing
