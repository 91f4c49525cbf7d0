"""The sizes of a job that decide its memory, read from verl's composed configuration and the model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from post_training.layouts.layout import RolloutPlacement, Table, TrainPlacement
from post_training.layouts.value_model import value_table
from post_training.models.families import sizes_of, table_for
from post_training.models.sizes import ModelSizes

# verl's limit of a micro batch where none is given.
_TOKENS = 16384


@dataclass(frozen=True)
class Recomputation:
    """granularity: `full` or `selective`. method, layers: of `full`, `block` or `uniform` and its number of layers."""

    granularity: str
    method: str = "block"
    layers: int = 1


@dataclass(frozen=True)
class Job:
    """Sizes are counts of tokens, sequences, prompts or dies; `itemsize` is the bytes of a weight.

    update_tokens: the most tokens of a micro batch, or None where it has a number of sequences. micro_update,
    micro_reference: sequences of one forward, of full length where tokens limit it.
    engine_sequences, forward_tokens: limits of an engine.
    chunks_prompts: whether the engine's scheduler cuts prompts.
    blocks: the KV cache's blocks where the configuration fixes them, else None. utilization: share of a die that an
    engine may fill. saves_every: steps between checkpoints, 0 for none.
    keeps: checkpoints that stay when a newer one is complete, 0 for all.
    weighs_in_float32: whether training adds the rows of a token's experts up in float32.
    log_prob_chunk_bytes: most bytes of float32 logits that exist together; None where all of a micro batch do.
    relays_weights: whether updated weights that several dies of a node need enter it once.
    critic: the same job with the critic in the actor's place, where one is trained.
    """

    sizes: ModelSizes
    table: Table
    train: TrainPlacement
    rollout: RolloutPlacement
    itemsize: int
    prompts: int
    responses: int
    sequence_tokens: int
    update_tokens: int | None
    micro_update: int
    micro_reference: int
    engine_sequences: int
    forward_tokens: int
    chunks_prompts: bool
    utilization: float
    blocks: int | None
    bucket_bytes: int
    dies_per_node: int
    recomputation: Recomputation | None
    saves_every: int
    keeps: int
    swaps_optimizer: bool
    weighs_in_float32: bool
    log_prob_chunk_bytes: int | None = None
    relays_weights: bool = False
    critic: Job | None = None

    @property
    def dies(self) -> int:
        return self.train.world_size

    @property
    def nodes(self) -> int:
        return self.dies // self.dies_per_node

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.prompts * self.responses


def read_job(config: Mapping[str, Any], model: Mapping[str, Any], swaps_optimizer: bool = False) -> Job:
    """Read a configuration that `check_configuration` has passed; `model` is the model's config.json.

    Raises:
        ValueError: a model or a placement without layouts, or a critic of another model than the actor.
    """
    job = _read_job(config, model, swaps_optimizer)
    return replace(job, critic=_critic(job, config)) if config["algorithm"]["adv_estimator"] == "gae" else job


def _critic(job: Job, config: Mapping[str, Any]) -> Job:
    """Of its forward for values verl takes micro batches as of its update."""
    critic, actors = config["critic"], config["actor_rollout_ref"]["model"]["path"]
    if critic["model"]["path"] != actors:
        raise ValueError(
            f"critic.model.path={critic['model']['path']} is another model than actor_rollout_ref.model.path={actors}, "
            "and the plan knows the sizes of one; plan the job with the actor's, or the critic's as a job of its own"
        )
    update = sequences_of(critic, "", "ppo_", job.sequence_tokens)
    return replace(
        job,
        table=value_table(job.table),
        sizes=replace(job.sizes, vocabulary=1),
        log_prob_chunk_bytes=None,
        micro_update=update,
        micro_reference=sequences_of(critic, "", "forward_", job.sequence_tokens) if job.update_tokens else update,
        recomputation=_recomputation(critic["model"], "critic.model"),
    )


def _read_job(config: Mapping[str, Any], model: Mapping[str, Any], swaps_optimizer: bool) -> Job:
    node = config["actor_rollout_ref"]
    actor, rollout, overlay = node["actor"], node["rollout"], node["overlay"]
    engine = rollout["engine_kwargs"]["vllm"]
    table = table_for(model)
    dies = config["trainer"]["nnodes"] * config["trainer"]["n_gpus_per_node"]
    longest = config["data"]["max_prompt_length"] + config["data"]["max_response_length"]
    return Job(
        sizes=sizes_of(model),
        table=table,
        train=train_placement_of(actor["megatron"], table.layers, dies),
        rollout=rollout_placement_of(rollout, overlay["rollout"]["expert_parallel_size"], dies),
        itemsize=4 if overlay["precision"] == "float32" else 2,
        prompts=config["data"]["train_batch_size"],
        responses=rollout["n"],
        sequence_tokens=longest,
        update_tokens=actor.get("ppo_max_token_len_per_gpu", _TOKENS) if actor["use_dynamic_bsz"] else None,
        micro_update=sequences_of(actor, "", "ppo_", longest),
        micro_reference=sequences_of(node["ref"], "log_prob_", "log_prob_", longest),
        engine_sequences=engine.get("max_num_seqs") or 256,
        forward_tokens=rollout["max_num_batched_tokens"],
        chunks_prompts=_chunks_prompts(engine),
        utilization=rollout["gpu_memory_utilization"],
        blocks=engine.get("num_gpu_blocks_override"),
        bucket_bytes=overlay["reshard"]["bucket_bytes"],
        dies_per_node=config["trainer"]["n_gpus_per_node"],
        recomputation=_recomputation(node["model"]),
        saves_every=max(config["trainer"]["save_freq"], 0),
        keeps=overlay.get("checkpoint", {}).get("keep_last") or config["trainer"]["max_actor_ckpt_to_keep"] or 0,
        swaps_optimizer=swaps_optimizer,
        # This project's own layer does; where MindSpeed swaps the optimizer, its fused operator does not.
        weighs_in_float32=not swaps_optimizer,
        log_prob_chunk_bytes=_log_prob_chunk_bytes(overlay),
    )


def _log_prob_chunk_bytes(overlay: Mapping[str, Any]) -> int | None:
    """What the feature chunked_log_probs computes at once; None where it is off."""
    chunked = overlay.get("chunked_log_probs") or {}
    return int(chunked["chunk_bytes"]) if chunked.get("enabled") else None


def sequences_of(group: Mapping[str, Any], switch: str, size: str, longest: int) -> int:
    """Sequences of `longest` tokens in a micro batch, rounded up where its limit is a number of tokens."""
    if group.get(f"{switch}use_dynamic_bsz"):
        return -(-int(group.get(f"{size}max_token_len_per_gpu", _TOKENS)) // longest)
    return int(group[f"{size}micro_batch_size_per_gpu"])


def _recomputation(model: Mapping[str, Any], group: str = "actor_rollout_ref.model") -> Recomputation | None:
    """What Megatron recomputes, from verl's keys in `group`. Raises ValueError for what Megatron does not know."""
    if not model["enable_gradient_checkpointing"]:
        return None
    asked = model.get("gradient_checkpointing_kwargs") or {}
    granularity, method, layers = (
        asked.get(f"activations_checkpoint_{name}") for name in ("granularity", "method", "num_layers")
    )
    key = f"{group}.gradient_checkpointing_kwargs.activations_checkpoint"
    if granularity == "selective":
        return Recomputation("selective")
    if granularity != "full":
        raise ValueError(f"{key}_granularity is {granularity}; choose full or selective")
    if method not in ("block", "uniform"):
        raise ValueError(f"{key}_method is {method}; choose block or uniform")
    if not isinstance(layers, int) or layers < 1:
        raise ValueError(f"{key}_num_layers is {layers}; give the layers to recompute, 1 or more")
    return Recomputation("full", method, layers)


def _chunks_prompts(engine: Mapping[str, Any]) -> bool:
    """vLLM's V1 scheduler always cuts prompts; the Ascend scheduler where it is told to."""
    scheduler = (engine.get("additional_config") or {}).get("ascend_scheduler_config") or {}
    return bool(not scheduler.get("enabled") or scheduler.get("enable_chunked_prefill"))


def train_placement_of(megatron: Mapping[str, Any], layers: int, dies: int) -> TrainPlacement:
    """Megatron's placement of a model of so many layers, from the `megatron` group of verl's configuration."""
    tp, pp = megatron["tensor_model_parallel_size"], megatron["pipeline_model_parallel_size"]
    transformer = megatron["override_transformer_config"]
    return TrainPlacement(
        tp=tp,
        pp=pp,
        ep=megatron["expert_model_parallel_size"],
        dp=dies // (tp * pp),
        num_layer_list=tuple(transformer.get("num_layer_list") or (layers // pp,) * pp),
        moe_tp_extend_ep=transformer.get("moe_tp_extend_ep", True),
    )


def rollout_placement_of(rollout: Mapping[str, Any], expert_parallel: int, dies: int) -> RolloutPlacement:
    """vLLM-Ascend's placement, from the `rollout` group of verl's configuration and the dies that share experts."""
    tp = rollout["tensor_model_parallel_size"]
    spread = expert_parallel > 1
    size = expert_parallel if spread else tp
    additional = rollout["engine_kwargs"]["vllm"].get("additional_config") or {}
    graph = additional.get("torchair_graph_config") or {}
    # As rollout_placement of the sharding manager reads it from the engine.
    choice = (graph, "enable_multistream_moe") if graph.get("enabled") else (additional, "enable_prefill_optimizations")
    # vLLM-Ascend divides the output layer by itself only where it divides nothing else.
    output_layer = (additional.get("lmhead_tp_size") or 0) if tp == 1 else 0
    return RolloutPlacement(
        tp=tp,
        dp=size // tp,
        ep=size if spread else 1,
        instances=dies // size,
        shared_expert_replicated=bool(choice[0].get(choice[1])),
        lm_head_tp=output_layer if output_layer > 0 else None,
    )
