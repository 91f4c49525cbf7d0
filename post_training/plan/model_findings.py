"""Checks whether a job can train and serve a model; `--check`, plan.py, preflight.py and workers all call it.

The check only reads the model's config.json and verl's configuration: it takes seconds and needs no device. For a job
that passes it, Megatron's configuration, the sharding specs and vLLM's checks of the model pass as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from post_training.layouts.layout import RolloutPlacement
from post_training.models.expert_placement import ExpertPlacement, expert_placement_findings
from post_training.models.families import (
    ModelFamily,
    decoder_values,
    families,
    family_of,
    find_family,
    sizes_of,
    unknown_architecture,
    variant_findings,
)
from post_training.models.sentences import invalid
from post_training.models.sizes import ModelSizes
from post_training.plan.job import rollout_placement_of, train_placement_of
from post_training.plan.rotary_findings import rotary_findings

MEGATRON = "actor_rollout_ref.actor.megatron"
TRANSFORMER = f"{MEGATRON}.override_transformer_config"
ROLLOUT = "actor_rollout_ref.rollout"
ADDITIONAL = f"{ROLLOUT}.engine_kwargs.vllm.additional_config"
EXPERT_PARALLEL = "actor_rollout_ref.overlay.rollout.expert_parallel_size"
# Fields that the overlay adds to Megatron's configuration.
OWN_TRANSFORMER_OPTIONS = frozenset({"num_layer_list", "moe_tp_extend_ep"})
_PATH = "Set actor_rollout_ref.model.path to"
# Scaling types that stretch positions without a longer context than max_position_embeddings.
_NOT_LONGER = ("llama3", "longrope", "su")


@dataclass(frozen=True)
class ModelUse:
    """A job's use of a model.

    Attributes:
        node: verl's group `actor_rollout_ref`, resolved.
        dies: of the whole run.
        serves: whether the rollout serves the model; it does not serve a critic.
    """

    node: Mapping[str, Any]
    backend: Literal["megatron", "fsdp"]
    dies: int
    serves: bool = True

    @property
    def megatron(self) -> Mapping[str, Any]:
        group: Mapping[str, Any] = self.node["actor"]["megatron"]
        return group

    @property
    def options(self) -> Mapping[str, Any]:
        """Fields of Megatron's configuration that the job overrides."""
        return self.megatron.get("override_transformer_config") or {}

    @property
    def rollout_expert_parallel(self) -> int:
        group = (self.node.get("overlay") or {}).get("rollout") or {}
        return int(group.get("expert_parallel_size") or 1)


def model_findings(config: Mapping[str, Any], use: ModelUse) -> Iterator[str]:
    """Yield a sentence for each reason why the job cannot use the model; a worker would end with the first one.

    Args:
        config: the values of the model's config.json.
    """
    config = decoder_values(config)
    trained = _as_trained(config, use)
    for rule in (_architecture, _backend, _images, _image_rows, _variants, _rope, _context, _layout, _graph, _tables):
        found = list(rule(trained, use))
        yield from found
        if found:  # later rules rely on earlier ones
            return
    if use.serves:
        yield from rotary_findings(config, use.node, use.backend)


def _as_trained(config: Mapping[str, Any], use: ModelUse) -> Mapping[str, Any]:
    """Return config.json with the job's overrides; verl has a key for them only with Megatron."""
    override = (use.node["model"].get("override_config") or {}).get("model_config") or {}
    return {**config, **override} if use.backend == "megatron" else config


def _architecture(config: Mapping[str, Any], use: ModelUse) -> Iterator[str]:
    """Check architecture and type: verl and vLLM choose a model by the former, transformers by the latter."""
    named, family = config.get("architectures"), find_family(config)
    if not isinstance(named, list) or len(named) != 1:
        known = ", ".join(each.architecture for each in families())
        reason = f"verl and vLLM build the model from the one architecture named there. Known are {known}"
        yield invalid("architectures", named, reason, "Copy the file again")
    elif family is None:
        yield unknown_architecture(config)
    elif config.get("model_type") not in family.model_types:
        reason = f"transformers would build another model than {family.architecture}"
        known = " or ".join(family.model_types)
        yield invalid("model_type", config.get("model_type"), reason, f"{_PATH} a model of type {known}")


def _backend(config: Mapping[str, Any], use: ModelUse) -> Iterator[str]:
    """Check that verl has the model for the job's backend."""
    family = family_of(config)
    if use.backend not in family.trained_with:
        yield (
            f"actor_rollout_ref.actor.strategy={use.backend} is invalid: verl has no Megatron model for {family.name}. "
            "Set it to fsdp, in a configuration with ppo_trainer and fsdp_on_npu such as qwen2_5_vl_7b_geo3k"
        )


def _images(config: Mapping[str, Any], use: ModelUse) -> Iterator[str]:
    """Reject packed batches and sequence parallelism for image models: three-part positions were only run padded."""
    if not family_of(config).reads_images:
        return
    sharing = use.node["actor"].get("ulysses_sequence_parallel_size") or 1
    if sharing > 1:
        yield (
            f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={sharing} is invalid: splitting sequences with "
            "images is not tested. Set it to 1"
        )
    elif use.node["model"].get("use_remove_padding"):
        yield (
            "actor_rollout_ref.model.use_remove_padding=true is invalid: sequences with images are tested only with "
            "padding. Set it to false"
        )


def _variants(config: Mapping[str, Any], use: ModelUse) -> Iterator[str]:
    yield from variant_findings(family_of(config), config)


def _rope(config: Mapping[str, Any], use: ModelUse) -> Iterator[str]:
    """Check that training can scale positions as the model's files specify."""
    scaling, family = config.get("rope_scaling"), family_of(config)
    if not scaling:
        return
    kind = scaling.get("rope_type", scaling.get("type"))
    if use.backend == "megatron" and kind not in family.rotary:
        known = " and ".join(sorted(family.rotary - {"default"}))
        reason = f"Megatron's {family.name} " + (f"supports only {known}" if known else "does not support it")
        remedy = "Set rope_scaling to null for sequences within the context of the model's training"
        yield invalid(
            "rope_scaling", scaling, reason, f"{remedy}, or train with FSDP" if not family.megatron else remedy
        )
    needed = ("factor", "original_max_position_embeddings") if kind == "yarn" else ()
    for name in needed:
        if not isinstance(scaling.get(name), int | float):
            yield invalid("rope_scaling", scaling, f"yarn needs a number for {name}", "Copy the file again")


def _context(config: Mapping[str, Any], use: ModelUse) -> Iterator[str]:
    """Check that no sequence is longer than the context that verl and vLLM serve."""
    rollout = use.node["rollout"]
    whole = rollout["prompt_length"] + rollout["response_length"]
    longest = max(whole, rollout.get("max_model_len") or 0)
    if use.serves and longest > _context_length(config):
        reason = (
            f"sequences of this job have up to {longest} tokens (data.max_prompt_length + data.max_response_length, or "
            f"{ROLLOUT}.max_model_len)"
        )
        remedy = f"Lower these keys, or set {_PATH.removeprefix('Set ')} a model with a longer context"
        yield invalid("max_position_embeddings", config["max_position_embeddings"], reason, remedy)


def _image_rows(config: Mapping[str, Any], use: ModelUse) -> Iterator[str]:
    """Reject dynamic batches and partial rollouts for image models.

    verl divides rows with images only by number, and a continued answer would lose its images.
    """
    if not family_of(config).reads_images:
        return
    node, overlay = use.node, use.node.get("overlay") or {}
    for group in ("actor", "ref", "rollout"):
        switch = "use_dynamic_bsz" if group == "actor" else "log_prob_use_dynamic_bsz"
        if (node.get(group) or {}).get(switch):
            yield (
                f"actor_rollout_ref.{group}.{switch}=true is invalid: verl splits rows with images only by their "
                "number. Set it to false"
            )
    if (overlay.get("partial_rollout") or {}).get("enabled"):
        yield (
            "actor_rollout_ref.overlay.partial_rollout.enabled=true is invalid: a continued answer would lose its "
            "images. Set it to false"
        )


def _context_length(config: Mapping[str, Any]) -> float:
    """Return the number of tokens of the longest sequence that vLLM accepts."""
    length, scaling = config["max_position_embeddings"], config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in _NOT_LONGER:
        return float(length)
    return float((scaling["original_max_position_embeddings"] if kind == "yarn" else length) * scaling.get("factor", 1))


def _layout(config: Mapping[str, Any], use: ModelUse) -> Iterator[str]:
    """Check that layers divide among stages, and heads and experts among dies."""
    if use.backend == "megatron":
        yield from _stages(use, config["num_hidden_layers"])
        yield from _own_options(config, use)
        yield from _megatron_divisions(config, use)
    yield from _rollout_divisions(config, use)


def stage_list_findings(megatron: Mapping[str, Any]) -> Iterator[str]:
    """Check that a list of layers has an entry for each stage; `megatron` is verl's group of that name."""
    listed, chunks = (megatron.get("override_transformer_config") or {}).get("num_layer_list"), _chunks(megatron)
    if listed is not None and len(listed) != chunks:
        yield (
            f"{TRANSFORMER}.num_layer_list={list(listed)} is invalid: it has length {len(listed)}, but "
            f"{MEGATRON}.pipeline_model_parallel_size makes {chunks} stages. Set it to {chunks} numbers, one per stage"
        )


def _chunks(megatron: Mapping[str, Any]) -> int:
    return int(megatron["pipeline_model_parallel_size"] * (megatron.get("virtual_pipeline_model_parallel_size") or 1))


def _stages(use: ModelUse, layers: int) -> Iterator[str]:
    """Check that every stage has layers, and that all stages together have the model's."""
    yield from stage_list_findings(use.megatron)
    listed, stages = use.options.get("num_layer_list"), use.megatron["pipeline_model_parallel_size"]
    if listed is not None and sum(listed) != layers:
        key = f"{TRANSFORMER}.num_layer_list={list(listed)}"
        yield f"{key} adds up to {sum(listed)} layers, but the model has {layers}; make it {layers}"
    elif listed is None and layers % _chunks(use.megatron):
        yield (
            f"{MEGATRON}.pipeline_model_parallel_size={stages} does not divide the model's {layers} layers; set "
            f"{TRANSFORMER}.num_layer_list to the layers of each stage"
        )


def _own_options(config: Mapping[str, Any], use: ModelUse) -> Iterator[str]:
    """Reject the overlay's fields of Megatron's configuration for models that the overlay does not build."""
    family = family_of(config)
    if family.megatron is not None:
        return
    for name in sorted(OWN_TRANSFORMER_OPTIONS & use.options.keys()):
        key = f"{TRANSFORMER}.{name}"
        yield (
            f"{key}={use.options[name]} is invalid: it is only for models that the overlay builds, and verl builds "
            f"{family.name}. Remove the key with ~{key}"
        )


def _megatron_divisions(config: Mapping[str, Any], use: ModelUse) -> Iterator[str]:
    sizes, megatron = sizes_of(config), use.megatron
    tensor_key, tensor = f"{MEGATRON}.tensor_model_parallel_size", megatron["tensor_model_parallel_size"]
    yield from _heads(tensor_key, tensor, config)
    groups = config.get("num_key_value_heads")
    if not sizes.mla and groups % tensor:
        yield (
            f"{tensor_key}={tensor} does not divide the model's {groups} key-value heads, which Megatron does not "
            "repeat; use a divisor"
        )
    expert_key, expert_parallel = f"{MEGATRON}.expert_model_parallel_size", megatron["expert_model_parallel_size"]
    if not sizes.experts:
        if expert_parallel > 1:
            yield f"{expert_key}={expert_parallel} spreads experts, but the model has none; set it to 1"
        return
    ranks = expert_parallel * (tensor if use.options.get("moe_tp_extend_ep", True) else 1)
    if sizes.experts % ranks:
        yield (
            f"{expert_key}={expert_parallel} puts the model's {sizes.experts} experts on {ranks} ranks, which do not "
            "divide them evenly; change it"
        )
    yield from expert_placement_findings(_expert_placement(config, sizes, use))


def _expert_placement(config: Mapping[str, Any], sizes: ModelSizes, use: ModelUse) -> ExpertPlacement:
    """Return the placement values that Megatron's configuration will have with the job's overrides."""
    megatron, options = use.megatron, use.options
    tensor = megatron["tensor_model_parallel_size"]
    return ExpertPlacement(
        layers=sizes.layers,
        stages=megatron["pipeline_model_parallel_size"],
        virtual_stages=megatron.get("virtual_pipeline_model_parallel_size"),
        num_layer_list=tuple(options.get("num_layer_list") or ()),
        dense_layers=sizes.dense_layers,
        experts=sizes.experts,
        groups=config.get("n_group") or 1,
        chosen_groups=config.get("topk_group") or 1,
        chosen=sizes.experts_per_token,
        tensor_parallel=tensor,
        expert_parallel=megatron["expert_model_parallel_size"],
        context_parallel=megatron.get("context_parallel_size") or 1,
        sequence_parallel=options.get("sequence_parallel", tensor > 1),
        whole_experts=options.get("moe_tp_extend_ep", True),
    )


def _rollout_divisions(config: Mapping[str, Any], use: ModelUse) -> Iterator[str]:
    """Check that heads divide among the dies of a rollout instance, and among those that share sequences.

    vLLM and verl repeat the heads of key and value if there are fewer of them than dies.
    """
    sharing = use.node["actor"].get("ulysses_sequence_parallel_size") or 1
    divided = {"actor_rollout_ref.actor.ulysses_sequence_parallel_size": sharing}
    if use.serves:
        divided = {f"{ROLLOUT}.tensor_model_parallel_size": use.node["rollout"]["tensor_model_parallel_size"]} | divided
    for key, size in divided.items():
        yield from _heads(key, size, config)
        heads = config.get("num_key_value_heads")
        if isinstance(heads, int) and heads > 0 and heads % size and size % heads:
            yield (
                f"{key}={size} neither divides the model's {heads} key-value heads nor is a multiple of them; use a "
                "divisor or a multiple"
            )
    spread = use.rollout_expert_parallel
    if use.serves and spread > 1 and not sizes_of(config).experts:
        yield f"{EXPERT_PARALLEL}={spread} spreads experts, but the model has none; set it to 1"


def _heads(key: str, size: int, config: Mapping[str, Any]) -> Iterator[str]:
    if config["num_attention_heads"] % size:
        yield f"{key}={size} does not divide the model's {config['num_attention_heads']} attention heads; use a divisor"


def _graph(config: Mapping[str, Any], use: ModelUse) -> Iterator[str]:
    """Check that vLLM-Ascend supports the rollout's kind of graph for the model."""
    rollout, family = use.node["rollout"], family_of(config)
    additional = (rollout["engine_kwargs"]["vllm"] or {}).get("additional_config") or {}
    torchair = bool((additional.get("torchair_graph_config") or {}).get("enabled"))
    if not use.serves or rollout["enforce_eager"] or torchair == (family.rollout_graphs == "torchair"):
        return
    known = " and ".join(each.name for each in families() if each.rollout_graphs == "torchair")
    kind = config["model_type"]
    yield (
        f"{ROLLOUT}.enforce_eager=False decodes in "
        + (
            f"torchair's graphs, which vLLM-Ascend has for {known} and not for {kind}; set "
            f"{ADDITIONAL}.torchair_graph_config.enabled=False"
            if torchair
            else f"ACL graphs, which vLLM-Ascend does not have for {kind}; set {ROLLOUT}.enforce_eager=True or "
            f"{ADDITIONAL}.torchair_graph_config.enabled=True"
        )
    )


def _tables(config: Mapping[str, Any], use: ModelUse) -> Iterator[str]:
    """Check that every weight can be placed on the dies: after the earlier rules only widths may fail to divide."""
    family = family_of(config)
    table = family.table(config)
    if use.backend == "megatron":
        try:
            train = train_placement_of(use.megatron, table.layers, use.dies)
            for rank in range(0, train.world_size, train.tp * train.dp):
                table.megatron(train, rank)
        except ValueError as error:
            size = use.megatron["tensor_model_parallel_size"]
            yield f"{MEGATRON}.tensor_model_parallel_size={size} is invalid: {error}. Set it to a divisor"
    if not use.serves:
        return
    try:
        table.vllm_ascend(_rollout_placement(family, use), 0)
    except ValueError as error:
        size = use.node["rollout"]["tensor_model_parallel_size"]
        yield f"{ROLLOUT}.tensor_model_parallel_size={size} is invalid: {error}. Set it to a divisor"


def _rollout_placement(family: ModelFamily, use: ModelUse) -> RolloutPlacement:
    rollout = use.node["rollout"]
    engine = {"vllm": rollout["engine_kwargs"]["vllm"] or {}}
    return rollout_placement_of({**rollout, "engine_kwargs": engine}, use.rollout_expert_parallel, use.dies)
