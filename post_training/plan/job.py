"""The sizes of a job that determine its memory, read from verl's composed configuration and the model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from post_training.layouts.layout import RolloutPlacement, Table, TrainPlacement
from post_training.layouts.value_model import value_table
from post_training.models.families import sizes_of, table_for
from post_training.models.sizes import ModelSizes

# verl's default limit of tokens in a micro batch.
_TOKENS = 16384


@dataclass(frozen=True)
class Recomputation:
    """Megatron's recomputation of activations.

    Attributes:
        granularity: `full` or `selective`.
        method: `block` or `uniform`; only for `full`.
        layers: the method's number of layers; only for `full`.
    """

    granularity: str
    method: str = "block"
    layers: int = 1


@dataclass(frozen=True)
class Job:
    """The sizes of a job: numbers of tokens, sequences, prompts or dies.

    Attributes:
        itemsize: bytes of a weight.
        update_tokens: upper bound of the tokens in a micro batch; None if a number of sequences limits it.
        micro_update, micro_reference: sequences in one forward, taken as full-length ones if tokens limit it.
        engine_sequences, forward_tokens: upper bounds of an engine.
        chunks_prompts: whether the engine's scheduler splits prompts.
        utilization: share of a die that an engine may fill.
        blocks: number of the KV cache's blocks if the configuration fixes it, else None.
        saves_every: steps between checkpoints, 0 for none.
        keeps: checkpoints that stay when a newer one is complete, 0 for all.
        weighs_in_float32: whether training sums the rows of a token's experts in float32.
        log_prob_chunk_bytes: upper bound of the float32 logits that exist together; None if all logits of a micro
            batch do.
        relays_weights: whether updated weights that several dies of a node need enter the node only once.
        context: training ranks that share a sequence, which `train.dp` counts too. Limits of tokens and `micro_...` are
            those of a micro batch on all of them.
        critic: the same job with the critic in the actor's place, if a critic is trained.
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
    context: int = 1
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

    def training_tokens(self, sequences: int) -> int:
        """Return the tokens that a training rank has of a micro batch with full-length sequences."""
        return -(-sequences * self.sequence_tokens // self.context)


def read_job(config: Mapping[str, Any], model: Mapping[str, Any], swaps_optimizer: bool = False) -> Job:
    """Read a configuration that has passed `check_configuration`; `model` is the model's config.json.

    Raises:
        ValueError: the model or the placement has no layouts, or the critic is another model than the actor.
    """
    job = _read_job(config, model, swaps_optimizer)
    return replace(job, critic=_critic(job, config)) if config["algorithm"]["adv_estimator"] == "gae" else job


def _critic(job: Job, config: Mapping[str, Any]) -> Job:
    """Return the critic's job. verl takes the update's micro batches for its forward too, unless tokens limit them."""
    critic, actors = config["critic"], config["actor_rollout_ref"]["model"]["path"]
    if critic["model"]["path"] != actors:
        raise ValueError(
            f"critic.model.path={critic['model']['path']} is invalid: the plan supports one model. Set it to "
            f"actor_rollout_ref.model.path={actors}, or plan the critic's model as a separate job"
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
    """Return the chunk size of the feature chunked_log_probs in bytes; None if it is off."""
    chunked = overlay.get("chunked_log_probs") or {}
    return int(chunked["chunk_bytes"]) if chunked.get("enabled") else None


def sequences_of(group: Mapping[str, Any], switch: str, size: str, longest: int, context: int = 1) -> int:
    """Return the number of sequences of `longest` tokens in a micro batch, rounded up if tokens limit it.

    The limit is one of each rank, and `context` ranks share a micro batch.
    """
    if group.get(f"{switch}use_dynamic_bsz"):
        return -(-int(group.get(f"{size}max_token_len_per_gpu", _TOKENS)) * context // longest)
    return int(group[f"{size}micro_batch_size_per_gpu"])


def _recomputation(model: Mapping[str, Any], group: str = "actor_rollout_ref.model") -> Recomputation | None:
    """Read Megatron's recomputation from verl's keys in `group`. Raises ValueError for values unknown to Megatron."""
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
        raise ValueError(f"{key}_granularity={granularity} is invalid. Set it to full or selective")
    if method not in ("block", "uniform"):
        raise ValueError(f"{key}_method={method} is invalid. Set it to block or uniform")
    if not isinstance(layers, int) or layers < 1:
        raise ValueError(f"{key}_num_layers={layers} is invalid. Set it to the layers to recompute, at least 1")
    return Recomputation("full", method, layers)


def _chunks_prompts(engine: Mapping[str, Any]) -> bool:
    """Return whether prompts are split: vLLM's V1 scheduler always does, the Ascend scheduler only if configured."""
    scheduler = (engine.get("additional_config") or {}).get("ascend_scheduler_config") or {}
    return bool(not scheduler.get("enabled") or scheduler.get("enable_chunked_prefill"))


def train_placement_of(megatron: Mapping[str, Any], layers: int, dies: int) -> TrainPlacement:
    """Return Megatron's placement of a model with `layers` layers, from verl's configuration group `megatron`."""
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
    """Return vLLM-Ascend's placement, from verl's group `rollout` and the number of dies that share experts."""
    tp = rollout["tensor_model_parallel_size"]
    spread = expert_parallel > 1
    size = expert_parallel if spread else tp
    additional = rollout["engine_kwargs"]["vllm"].get("additional_config") or {}
    graph = additional.get("torchair_graph_config") or {}
    # The same keys as rollout_placement of the sharding manager reads from the engine.
    choice = (graph, "enable_multistream_moe") if graph.get("enabled") else (additional, "enable_prefill_optimizations")
    # vLLM-Ascend shards the output layer on its own only if it shards nothing else.
    output_layer = (additional.get("lmhead_tp_size") or 0) if tp == 1 else 0
    return RolloutPlacement(
        tp=tp,
        dp=size // tp,
        ep=size if spread else 1,
        instances=dies // size,
        shared_expert_replicated=bool(choice[0].get(choice[1])),
        lm_head_tp=output_layer if output_layer > 0 else None,
    )
