"""Descriptions of model families for the rest of the project, and the lookup of a model's family.

Each module of this folder with a FAMILY is one family; no other code names it.
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
# Kinds of position scaling that verl's own builder of Megatron models has.
_VERL_ROTARY = frozenset({"default", "linear"})
TEXT_CONFIG = "text_config"
_ANOTHER = "Set actor_rollout_ref.model.path to another model"


def _no_variants(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield nothing: the family describes all of its models."""
    yield from ()


@dataclass(frozen=True)
class MegatronModel:
    """How Megatron builds a family with this project's modules; both functions import Megatron when they are called.

    Attributes:
        config: (hf_config, dtype, **overrides of the transformer's configuration) -> that configuration.
        build: (configuration, hf_config, pre_process, post_process, freeze_moe_router=...) -> one pipeline stage.
        rotary: kinds of `rope_scaling` that it computes; "default" means no scaling.
    """

    config: Callable[..., Any]
    build: Callable[..., Any]
    rotary: frozenset[str] = frozenset({"default"})


@dataclass(frozen=True)
class MindspeedModel:
    """How MindSpeed-LLM builds a family.

    Attributes:
        arguments: hf_config -> MindSpeed-LLM's options that describe the model; raises ValueError for a model that they
            cannot represent.
        config: completes Megatron's configuration.
        build: as in `MegatronModel`.
    """

    arguments: Callable[[Any], dict[str, Any]]
    config: Callable[[Any], Any]
    build: Callable[..., Any]


@dataclass(frozen=True)
class ModelFamily:
    """Everything that differs between families; code that needs a part rejects families that lack it.

    Functions of a config.json receive its values as `decoder_values` returns them.

    Attributes:
        name: as its authors write it.
        architecture: the one in its config.json.
        model_types: of config.json; any after the first are other types with the same sizes.
        table, sizes: functions of a config.json; they raise ValueError for a variant that they do not describe, and
            KeyError if a value is missing.
        shards: function of a config.json; returns the shape from which the forms of MindSpeed-LLM's shards are derived.
            None if there are none.
        megatron: None if verl's own model is trained.
        mindspeed: None if MindSpeed-LLM does not train the family.
        published: values of config.json by the name that a user types, as far as layouts need them.
        balances_router: whether tokens can be dealt out to its experts by force.
        rollout_graphs: the graphs in which vLLM-Ascend decodes it.
        positive: keys of config.json, besides those of every model, whose values must be integers above 0.
        variants: function of a config.json; yields a sentence for each value that this project cannot train.
        trained_with: verl's back-ends that have the model.
        reads_images: whether prompts may contain images, for which the model's folder has a processor.
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
        """The kinds of rope_scaling that the family's Megatron model computes; "default" means no scaling."""
        return _VERL_ROTARY if self.megatron is None else self.megatron.rotary


# Computations for larger models would take hours, or more memory than there is.
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
    """Return all families, in the order of their modules' names."""
    modules = (
        importlib.import_module(f"{__package__}.{each.name}")
        for each in pkgutil.iter_modules([str(Path(__file__).parent)])
        if not each.ispkg
    )
    return tuple(module.FAMILY for module in modules if hasattr(module, "FAMILY"))


def find_family(config: Any) -> ModelFamily | None:
    """Return the family of a model, by its transformers config or the mapping of its config.json; None if it has none.

    The first of `architectures` decides, or `model_type` if there are none.
    """
    architecture = _architecture(config)
    for family in families():
        if architecture == family.architecture if architecture else _field(config, "model_type") in family.model_types:
            return family
    return None


def family_of(config: Any) -> ModelFamily:
    """Return the same. Raises ValueError for a model without a family."""
    family = find_family(config)
    if family is None:
        raise ValueError(unknown_architecture(config))
    return family


def unknown_architecture(config: Any) -> str:
    """Return the sentence that rejects a model without a family and lists the known architectures."""
    known = ", ".join(each.architecture for each in families())
    return invalid(
        "architectures",
        _field(config, "architectures") or [],
        f"no sharding spec for architecture {_architecture(config)}. Known are {known}",
        "Set actor_rollout_ref.model.path to a model of one of these",
    )


def variant_findings(family: ModelFamily, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each value of a config.json with which this project cannot train the model in any job.

    Training and rollout both compute in bfloat16 or float32, without dropout, and every token attends to all earlier
    ones.
    """
    yield from family.variants(config)
    for key in (*_SIZES, *family.positive):
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield invalid(key, value, f"every {family.name} has an integer above 0 there", "Copy the file again")
    if config.get("quantization_config"):
        reason = "the checkpoint is quantised, but training and rollout compute in bfloat16"
        remedy = (
            "Remove quantization_config and use bf16 weights: scripts/fp8_cast_bf16.py converts FP8, and "
            "actor_rollout_ref.actor.megatron.load_from_hf reads FP8 directly"
        )
        yield invalid("quantization_config", config["quantization_config"], reason, remedy)
    if config.get("use_sliding_window"):
        reason = "vLLM does not support sliding windows in only some layers, and Megatron not at all"
        yield invalid("use_sliding_window", True, reason, f"{_ANOTHER}, or set it to false if it was trained without")
    if config.get("dual_chunk_attention_config"):
        reason = "neither training nor the rollout on the NPU supports dual chunk attention"
        remedy = "Remove dual_chunk_attention_config for sequences within original_max_position_embeddings"
        yield invalid("dual_chunk_attention_config", config["dual_chunk_attention_config"], reason, remedy)
    if config.get("hidden_act", "silu") != "silu":
        yield invalid("hidden_act", config["hidden_act"], "only silu is supported", _ANOTHER)
    if config.get("attention_dropout"):
        reason = "neither training nor the rollout on the NPU supports attention dropout"
        yield invalid("attention_dropout", config["attention_dropout"], reason, "Set attention_dropout to 0.0")


def decoder_values(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a config.json with those of the decoder at its top level, as in text-only models.

    Published files of models with images have them there. Files written by transformers 4.52 or later have them in
    `text_config` (and perhaps at the top level too), and transformers and vLLM then read only `text_config`.
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


_OF_TRANSFORMERS_5 = {"num_experts": "num_local_experts"}


def table_for(config: Any) -> Table:
    """Return the sharding spec of a model, by its transformers config or the mapping of its config.json.

    Raises ValueError for an architecture without a spec, or for a variant that its spec does not describe.
    """
    family = family_of(config)
    return _described(
        family, family.table, _published(config) if isinstance(config, Mapping) else config_values(config)
    )


def _published(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config.json under published names; transformers 5 writes its own for some of them."""
    return {name: config[own] for name, own in _OF_TRANSFORMERS_5.items() if own in config} | dict(config)


def config_values(config: Any) -> dict[str, Any]:
    """Return a transformers config under published names: transformers 5 calls `num_experts` num_local_experts."""
    values = config.to_dict()
    aliases = getattr(config, "attribute_map", {})
    return {name: values[own] for name, own in aliases.items() if own in values} | values


def shard_shape_of(config: Mapping[str, Any]) -> Any:
    """Return the shape that determines the forms of a model's shards. Raises ValueError for a family without shards."""
    family = family_of(config)
    if family.shards is None:
        known = " and ".join(each.name for each in families() if each.shards)
        raise ValueError(
            f"shards are made from {known}, but this model is {family.name}: training reads its HuggingFace folder "
            "directly, and export_hf.py writes the trained one"
        )
    return _described(family, family.shards, config)


def check_sizes(config: Mapping[str, Any]) -> None:
    """Check that the sizes of a config.json are whole numbers that a model can have; null means an absent part.

    Raises:
        ValueError: one is not; one sentence.
    """
    for key, (least, most) in _SIZE_RANGES.items():
        value = config.get(key)
        is_given = value is not None or (key in _REQUIRED and key in config)
        if is_given and (type(value) is not int or not least <= value <= most):
            shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
            raise ValueError(
                f"config.json: {key}={shown} is invalid: no model has this value. Set it to a number from "
                f"{least} to {most}"
            )


def sizes_of(config: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes of the model that a config.json describes. Raises ValueError if it has none."""
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
