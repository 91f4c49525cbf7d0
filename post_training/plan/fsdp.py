"""Device memory of a job on FSDP by phase: what verl, torch and vLLM-Ascend's sleep mode keep on a die, in bytes.

Weights, gradients and Adam's moments are float32 shards, and every unit (a layer; embeddings and output layer) is cast
to the compute type and gathered when it works. Between the phases the engine sleeps and holds nothing. Activations are
estimates from the largest tensors, as in `activations`; constants are measured on the emulated NPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from post_training.layouts.layout import RolloutPlacement
from post_training.models.families import sizes_of, table_for
from post_training.models.sizes import ModelSizes
from post_training.plan.device import CACHE_ALIGNMENT, CACHE_BLOCK, GRADIENT_BYTES, MOMENT_BYTES, SMALL_BUFFERS, Rank
from post_training.plan.job import sequences_of

MASTER_BYTES = 4
# transformers makes the mask of its NPU attention at every call: two squares in float32, and one of bytes that is kept.
ATTENTION_MASK = 2048 * 2048
_LAYER = "model.layers.0."
REMEDIES = {
    "init": "lower actor_rollout_ref.rollout.gpu_memory_utilization",
    "reshard": "lower actor_rollout_ref.rollout.gpu_memory_utilization",
    "rollout": "lower actor_rollout_ref.rollout.gpu_memory_utilization",
    "old_log_prob": "lower actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "ref": "lower actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "update": "lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, or use more dies",
}
OPTIMIZER_OFFLOAD = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"


@dataclass(frozen=True)
class FsdpJob:
    """Sizes are counts of elements, tokens, sequences or dies; `itemsize` is the bytes of the compute type.

    layer, root: elements of a unit, and of what no layer owns. engine: of an engine's rank.
    entropy: whether the update computes it. away_*: what verl moves to the host when it is not at work.
    """

    sizes: ModelSizes
    elements: int
    layer: int
    engine: int
    dies: int
    rollout_tp: int
    itemsize: int
    prompts: int
    responses: int
    sequence_tokens: int
    response_tokens: int
    micro_update: int
    micro_old: int
    micro_reference: int
    entropy: bool
    recomputes: bool
    away_parameters: bool
    away_optimizer: bool
    forward_tokens: int
    engine_sequences: int
    utilization: float
    blocks: int | None

    @property
    def root(self) -> int:
        return self.elements - self.sizes.layers * self.layer

    @property
    def shard(self) -> int:
        """Elements of a die's shard."""
        return -(-self.elements // self.dies)


def read_fsdp_job(config: Mapping[str, Any], model: Mapping[str, Any]) -> FsdpJob:
    """Read a configuration on FSDP that `check_configuration` has passed; `model` is the model's config.json.

    Raises:
        ValueError: a model without layouts, or a rollout that does not fit it.
    """
    node, data = config["actor_rollout_ref"], config["data"]
    actor, rollout, engine = node["actor"], node["rollout"], node["rollout"]["engine_kwargs"]["vllm"]
    table, tp = table_for(model), rollout["tensor_model_parallel_size"]
    dies = config["trainer"]["nnodes"] * config["trainer"]["n_gpus_per_node"]
    longest = data["max_prompt_length"] + data["max_response_length"]
    placement = RolloutPlacement(tp=tp, dp=1, ep=1, instances=dies // tp, shared_expert_replicated=False)
    elements = {name: prod(shape) for name, shape in table.shapes.items()}
    return FsdpJob(
        sizes=sizes_of(model),
        elements=sum(elements.values()),
        layer=sum(size for name, size in elements.items() if name.startswith(_LAYER)),
        engine=Rank.of(table.vllm_ascend(placement, 0)).elements,
        dies=dies,
        rollout_tp=tp,
        itemsize=4 if node["overlay"]["precision"] == "float32" else 2,
        prompts=data["train_batch_size"],
        responses=rollout["n"],
        sequence_tokens=longest,
        response_tokens=data["max_response_length"],
        micro_update=sequences_of(actor, "", "ppo_", longest),
        micro_old=sequences_of(rollout, "log_prob_", "log_prob_", longest),
        micro_reference=sequences_of(node["ref"], "log_prob_", "log_prob_", longest),
        entropy=actor["entropy_coeff"] != 0,
        recomputes=node["model"]["enable_gradient_checkpointing"],
        away_parameters=actor["fsdp_config"]["param_offload"],
        away_optimizer=actor["fsdp_config"]["optimizer_offload"],
        forward_tokens=rollout["max_num_batched_tokens"],
        engine_sequences=engine.get("max_num_seqs") or rollout.get("max_num_seqs") or 256,
        utilization=rollout["gpu_memory_utilization"],
        blocks=engine.get("num_gpu_blocks_override"),
    )


@dataclass(frozen=True)
class FsdpMemory:
    """Peak bytes of a die by phase, and the parts that they consist of."""

    weights: int
    gradients: int
    optimizer: int
    engine_weights: int
    kv_cache: int
    kv_tokens: int
    phases: dict[str, int]


def fsdp_memory(job: FsdpJob, die_bytes: int) -> FsdpMemory:
    """Work out every phase for dies of `die_bytes`, of which the engine fills its share."""
    weights, optimizer = job.shard * MASTER_BYTES, job.shard * MOMENT_BYTES
    rests = (0 if job.away_parameters else weights) + (0 if job.away_optimizer else optimizer)
    served = job.engine * job.itemsize
    # When the engine sees how much of the die is taken, the optimizer has no state and there is no reference policy.
    taken = served + (0 if job.away_parameters else weights) + _engine_forward(job)
    tokens = _kv_tokens(job, int(die_bytes * job.utilization) - taken)
    cache = tokens * _kv_bytes_of_token(job) + 2 * job.sizes.layers * CACHE_ALIGNMENT * job.itemsize
    fixed = (
        _reference_weights(job)
        + SMALL_BUFFERS
        + job.sizes.rotary * job.itemsize
        + job.sequence_tokens**2 * job.itemsize
    )
    engine = served + cache
    return FsdpMemory(
        weights=weights,
        gradients=job.shard * GRADIENT_BYTES,
        optimizer=optimizer,
        engine_weights=served,
        kv_cache=cache,
        kv_tokens=tokens,
        phases={
            "reshard": fixed + rests + (weights if job.away_parameters else 0) + engine + _exported(job),
            "rollout": fixed + rests + engine + _engine_forward(job),
            "old_log_prob": fixed
            + rests
            + (weights if job.away_parameters else 0)
            + _forward(job, job.micro_old, False),
            "ref": fixed + rests + _forward(job, job.micro_reference, True),
            "update": fixed + weights + optimizer + _update(job),
        },
    )


def _exported(job: FsdpJob) -> int:
    """What leaves FSDP for the engine: on one die copies of all weights, else one tensor after the other, whole."""
    if job.dies == 1:
        return job.elements * MASTER_BYTES
    return 2 * job.sizes.vocabulary * job.sizes.hidden * MASTER_BYTES


def _layers(job: FsdpJob) -> int:
    """A layer at work in the compute type and, where it is gathered, the one that comes next."""
    return (1 if job.dies == 1 else 2) * job.layer * job.itemsize


def _layer_activations(job: FsdpJob, tokens: int) -> int:
    """What a layer of transformers keeps for its backward: float32 norms, inputs of matrices, attention, gated MLP."""
    sizes = job.sizes
    norms = 2 * sizes.hidden * (4 + job.itemsize)
    return tokens * (norms + job.itemsize * (4 * sizes.hidden + sizes.kept_by_heads + 4 * sizes.intermediate))


def _reference_weights(job: FsdpJob) -> int:
    """FSDP shards nothing on a die that is alone; the reference policy then was seen to stay there, or on the host."""
    return job.elements * job.itemsize if job.dies == 1 else 0


def _forward(job: FsdpJob, sequences: int, reference: bool) -> int:
    """Without gradients: a layer at work, or the logits and three float32 copies of answers' logits.

    Log-probs are taken answer by answer, the actor's entropy of all of them at once. The root stays gathered until the
    end; on one die there is nothing to gather, and it is gone when the logits are there.
    """
    tokens, vocabulary = sequences * job.sequence_tokens, job.sizes.vocabulary
    answer = job.response_tokens * vocabulary * 4
    logits = tokens * vocabulary * job.itemsize + 3 * (1 if reference else sequences) * answer
    root, widths = job.root * job.itemsize, 4 * job.sizes.hidden + 3 * job.sizes.intermediate
    layer = root + _layers(job) + 2 * 4 * ATTENTION_MASK + tokens * job.itemsize * widths
    return max(logits + (root if job.dies > 1 else 0), layer)


def _update(job: FsdpJob) -> int:
    """Beside weights and moments: gradients and the larger of a backward and Adam's temporary of a shard."""
    tokens, vocabulary = job.micro_update * job.sequence_tokens, job.sizes.vocabulary
    answer, layer = job.response_tokens * vocabulary * 4, _layer_activations(job, tokens)
    inputs = tokens * job.sizes.hidden * job.itemsize * job.sizes.layers
    kept = inputs if job.recomputes else job.sizes.layers * layer
    whole = tokens * vocabulary * job.itemsize
    # Log-probs stay in float32, and with the entropy two more of the kind; then come two gradients of the logits.
    logits = max(3 * whole, whole + (3 if job.entropy else 1) * job.micro_update * answer + 3 * answer)
    # The gradient of a unit in the compute type and, before it is reduced, in float32.
    unit = job.layer * (job.itemsize + GRADIENT_BYTES)
    at_work = layer + unit + _layers(job) + (2 * 4 + 1) * ATTENTION_MASK
    backward = job.root * job.itemsize + kept + max(logits, at_work)
    return job.shard * GRADIENT_BYTES + max(backward, job.shard * MASTER_BYTES)


def _engine_forward(job: FsdpJob) -> int:
    sizes = job.sizes
    layer = job.forward_tokens * job.itemsize * (2 * sizes.hidden + 3 * sizes.intermediate // job.rollout_tp)
    logits = job.engine_sequences * sizes.vocabulary * (job.itemsize + 4 + 4)
    return max(layer, logits)


def _kv_bytes_of_token(job: FsdpJob) -> int:
    return job.sizes.layers * job.sizes.cache(job.rollout_tp) * job.itemsize


def _kv_tokens(job: FsdpJob, left: int) -> int:
    if job.blocks is not None:
        return job.blocks * CACHE_BLOCK
    return max(left, 0) // (_kv_bytes_of_token(job) * CACHE_BLOCK) * CACHE_BLOCK
