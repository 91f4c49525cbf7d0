"""Device memory of a job on FSDP by phase, in bytes of a die, with verl, torch and vLLM-Ascend's sleep mode.

Weights, gradients and Adam's moments are float32 shards, and every unit (a layer; embeddings and output layer) is cast
to the compute type and gathered when it runs. Outside of rollouts the engine sleeps and holds nothing. Activations are
estimated from the largest tensors, as in `activations`; constants were measured on the emulated NPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from post_training.layouts.layout import RolloutPlacement
from post_training.models.families import sizes_of, table_for
from post_training.models.sizes import ModelSizes
from post_training.plan.device import CACHE_ALIGNMENT, CACHE_BLOCK, GRADIENT_BYTES, MOMENT_BYTES, SMALL_BUFFERS, Rank
from post_training.plan.job import sequences_of
from post_training.plan.vision import ImageLoad

MASTER_BYTES = 4
# Elements of the mask that transformers makes at every call of its NPU attention: two float32 masks, and one in bytes
# that is kept.
ATTENTION_MASK = 2048 * 2048
_LAYER, _OUTPUT_LAYER = "model.layers.0.", "lm_head.weight"
REMEDIES = {
    "init": "lower actor_rollout_ref.rollout.gpu_memory_utilization",
    "reshard": "lower actor_rollout_ref.rollout.gpu_memory_utilization",
    "rollout": "lower actor_rollout_ref.rollout.gpu_memory_utilization",
    "old_log_prob": "lower actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "ref": "lower actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "values": "lower critic.forward_micro_batch_size_per_gpu, or use more dies",
    "update_critic": "lower critic.ppo_micro_batch_size_per_gpu, or use more dies",
    "update": "lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, or use more dies",
}
OPTIMIZER_OFFLOAD = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"


@dataclass(frozen=True)
class FsdpJob:
    """The sizes of a job on FSDP: numbers of elements, tokens, sequences or dies.

    Attributes:
        elements: of the whole model.
        output_layer: elements of a separate output layer, which FSDP1 has in the root unit; 0 if it is tied.
        layer: elements of a layer, which is an FSDP unit.
        engine: elements on a rank of the rollout engine.
        itemsize: bytes of the compute type.
        entropy: whether the update computes the entropy.
        accumulates: whether an update has several micro batches, and so holds gradients from the first one on.
        away_parameters, away_optimizer: whether verl offloads them to the host while they are not in use.
        by_rows: sharded by FSDP2 instead of FSDP1.
        critic: PPO's, as a job whose model has one output, and whose `micro_old` is the micro batch of its forward.
        images: None for a text-only model.
    """

    sizes: ModelSizes
    elements: int
    output_layer: int
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
    accumulates: bool
    recomputes: bool
    away_parameters: bool
    away_optimizer: bool
    forward_tokens: int
    engine_sequences: int
    utilization: float
    blocks: int | None
    by_rows: bool = False
    critic: FsdpJob | None = None
    images: ImageLoad | None = None

    @property
    def root(self) -> int:
        """Elements of the root unit, which no layer owns.

        With FSDP2, embeddings that are not the output layer too are a unit of their own, as large as the output layer.
        """
        units = self.sizes.layers * self.layer + (self.images.blocks if self.images else 0)
        return self.elements - units - (self.output_layer if self.by_rows else 0)

    @property
    def shard(self) -> int:
        """Elements of a die's shard."""
        return -(-self.elements // self.dies)


def read_fsdp_job(config: Mapping[str, Any], model: Mapping[str, Any]) -> FsdpJob:
    """Read a configuration on FSDP that has passed `check_configuration`; `model` is the model's config.json.

    Raises:
        ValueError: the model has no layouts, or the rollout does not fit it.
    """
    node, data = config["actor_rollout_ref"], config["data"]
    actor, rollout, engine = node["actor"], node["rollout"], node["rollout"]["engine_kwargs"]["vllm"]
    table, tp = table_for(model), rollout["tensor_model_parallel_size"]
    dies = config["trainer"]["nnodes"] * config["trainer"]["n_gpus_per_node"]
    longest = data["max_prompt_length"] + data["max_response_length"]
    placement = RolloutPlacement(tp=tp, dp=1, ep=1, instances=dies // tp, shared_expert_replicated=False)
    elements = {name: prod(shape) for name, shape in table.shapes.items()}
    sizes, itemsize = sizes_of(model), 4 if node["overlay"]["precision"] == "float32" else 2
    job = FsdpJob(
        sizes=sizes,
        elements=sum(elements.values()),
        output_layer=elements.get(_OUTPUT_LAYER, 0),
        layer=sum(size for name, size in elements.items() if name.startswith(_LAYER)),
        engine=Rank.of(table.vllm_ascend(placement, 0)).elements,
        dies=dies,
        rollout_tp=tp,
        itemsize=itemsize,
        prompts=data["train_batch_size"],
        responses=rollout["n"],
        sequence_tokens=longest,
        response_tokens=data["max_response_length"],
        micro_update=sequences_of(actor, "", "ppo_", longest),
        micro_old=sequences_of(rollout, "log_prob_", "log_prob_", longest),
        micro_reference=sequences_of(node["ref"], "log_prob_", "log_prob_", longest),
        entropy=actor["entropy_coeff"] != 0,
        accumulates=_accumulates(actor, rollout["n"], dies // actor["ulysses_sequence_parallel_size"], longest),
        recomputes=node["model"]["enable_gradient_checkpointing"],
        away_parameters=actor["fsdp_config"]["param_offload"],
        away_optimizer=actor["fsdp_config"]["optimizer_offload"],
        forward_tokens=rollout["max_num_batched_tokens"],
        # Neither release of verl hands rollout.max_num_seqs to the engine.
        engine_sequences=engine.get("max_num_seqs") or 256,
        utilization=rollout["gpu_memory_utilization"],
        blocks=engine.get("num_gpu_blocks_override"),
        by_rows=actor["strategy"] == "fsdp2",
        images=_images(sizes, elements, config, itemsize),
    )
    return replace(job, critic=_critic(job, config)) if config["algorithm"]["adv_estimator"] == "gae" else job


def _images(
    sizes: ModelSizes, elements: Mapping[str, int], config: Mapping[str, Any], itemsize: int
) -> ImageLoad | None:
    """Return the load of prompts that are only images. An engine encodes at most one prefill at once, or one image."""
    tower, prompt = sizes.vision, config["data"]["max_prompt_length"]
    if tower is None:
        return None
    block = sum(size for name, size in elements.items() if name.startswith(tower.block))
    at_once = max(config["actor_rollout_ref"]["rollout"]["max_num_batched_tokens"], prompt)
    return ImageLoad(tower, block, prompt, at_once, itemsize, sizes.hidden)


def _critic(job: FsdpJob, config: Mapping[str, Any]) -> FsdpJob:
    """Return the critic's job: the actor's model with a single output, with a bias, in place of the output layer."""
    node, actors = config["critic"], config["actor_rollout_ref"]["model"]["path"]
    path, away = node["model"]["path"], node["model"]["fsdp_config"]
    if path != actors:
        raise ValueError(
            f"critic.model.path={path} is invalid: a plan supports one model. Set it to "
            f"actor_rollout_ref.model.path={actors}"
        )
    forward = node["forward_micro_batch_size_per_gpu"] or node["ppo_micro_batch_size_per_gpu"]
    return replace(
        job,
        sizes=replace(job.sizes, vocabulary=1),
        elements=job.elements - job.output_layer + job.sizes.hidden + 1,
        output_layer=job.sizes.hidden + 1,
        micro_update=sequences_of(node, "", "ppo_", job.sequence_tokens),
        micro_old=sequences_of(
            {**node, "forward_micro_batch_size_per_gpu": forward}, "", "forward_", job.sequence_tokens
        ),
        entropy=False,
        accumulates=_accumulates(node, job.responses, job.dies, job.sequence_tokens),
        recomputes=node["model"]["enable_gradient_checkpointing"],
        away_parameters=away["param_offload"],
        away_optimizer=away["optimizer_offload"],
    )


def _accumulates(node: Mapping[str, Any], responses: int, replicas: int, longest: int) -> bool:
    return bool(node["ppo_mini_batch_size"] * responses // replicas > sequences_of(node, "", "ppo_", longest))


@dataclass(frozen=True)
class FsdpMemory:
    """Peak bytes of a die by phase, and their parts; `kv_tokens` is a number of tokens."""

    weights: int
    gradients: int
    optimizer: int
    critic_weights: int
    critic_optimizer: int
    engine_weights: int
    kv_cache: int
    kv_tokens: int
    phases: dict[str, int]


def fsdp_memory(job: FsdpJob, die_bytes: int) -> FsdpMemory:
    """Compute the memory of every phase for dies of `die_bytes`, of which the engine fills its share."""
    weights, optimizer, rests = _kept(job)
    critic_weights, critic_optimizer, critic_rests = _kept(job.critic) if job.critic else (0, 0, 0)
    served = job.engine * job.itemsize
    # When the engine measures free memory, the optimizer has no state yet and there is no reference policy.
    taken = served + (0 if job.away_parameters else weights) + _engine_forward(job)
    taken += 0 if job.critic is None or job.critic.away_parameters else critic_weights
    tokens = _kv_tokens(job, int(die_bytes * job.utilization) - taken)
    cache = tokens * _kv_bytes_of_token(job) + 2 * job.sizes.layers * CACHE_ALIGNMENT * job.itemsize
    always = (
        _reference_weights(job)
        + SMALL_BUFFERS
        + job.sizes.rotary * job.itemsize
        + job.sequence_tokens**2 * job.itemsize
    )
    fixed, engine, returned = always + critic_rests, served + cache, weights if job.away_parameters else 0
    phases = {
        "reshard": fixed + rests + returned + engine + _exported(job),
        "rollout": fixed + rests + engine + max(_engine_forward(job), _engine_images(job)),
        "old_log_prob": fixed + rests + returned + _forward(job, job.micro_old, False),
        "ref": fixed + rests + _forward(job, job.micro_reference, True),
        "update": fixed + weights + optimizer + _update(job),
    }
    if job.critic is not None:
        at_work = always + rests + critic_weights
        moments = 0 if job.critic.away_optimizer else critic_optimizer
        phases["values"] = at_work + moments + _forward(job.critic, job.critic.micro_old, True)
        phases["update_critic"] = at_work + critic_optimizer + _update(job.critic)
    return FsdpMemory(
        weights=weights,
        gradients=job.shard * GRADIENT_BYTES,
        optimizer=optimizer,
        critic_weights=critic_weights,
        critic_optimizer=critic_optimizer,
        engine_weights=served,
        kv_cache=cache,
        kv_tokens=tokens,
        phases=phases,
    )


def _kept(job: FsdpJob) -> tuple[int, int, int]:
    """Return the bytes of a shard's weights, of its moments, and of those of them that stay on the die between uses."""
    weights, optimizer = job.shard * MASTER_BYTES, job.shard * MOMENT_BYTES
    return (
        weights,
        optimizer,
        (0 if job.away_parameters else weights) + (0 if job.away_optimizer else optimizer),
    )


def _exported(job: FsdpJob) -> int:
    """Return the bytes of weights on their way to the engine.

    With FSDP1 on one die these are copies of all weights, otherwise whole tensors, one after another.
    """
    if job.dies == 1 and not job.by_rows:
        return job.elements * MASTER_BYTES
    return 2 * job.sizes.vocabulary * job.sizes.hidden * MASTER_BYTES


def _layers(job: FsdpJob) -> int:
    """Return the bytes of the running layer in the compute type and, if layers are gathered, of the next one."""
    return (1 if job.dies == 1 else 2) * job.layer * job.itemsize


def _layer_activations(job: FsdpJob, tokens: int) -> int:
    """Return the bytes that a transformers layer keeps for its backward.

    They are float32 norms, inputs of matrices, attention and the gated MLP.
    """
    sizes = job.sizes
    norms = 2 * sizes.hidden * (4 + job.itemsize)
    return tokens * (norms + job.itemsize * (4 * sizes.hidden + sizes.kept_by_heads + 4 * sizes.intermediate))


def _reference_weights(job: FsdpJob) -> int:
    """Return the bytes of a reference policy that stays on the die.

    On a single die FSDP1 shards nothing, and the policy was observed to stay there, or on the host.
    """
    return job.elements * job.itemsize if job.dies == 1 and not job.by_rows else 0


def _forward(job: FsdpJob, sequences: int, reference: bool) -> int:
    """Return the peak of a forward without gradients: a running layer, or logits and three float32 copies for answers.

    Log-probs are computed answer by answer, the actor's entropy for all answers at once. The root stays gathered until
    the end; on one die nothing is gathered, and the cast root is released before the logits exist.
    """
    tokens, vocabulary = sequences * job.sequence_tokens, job.sizes.vocabulary
    answer = job.response_tokens * vocabulary * 4
    logits = tokens * vocabulary * job.itemsize + 3 * (1 if reference else sequences) * answer
    root, widths = job.root * job.itemsize, 4 * job.sizes.hidden + 3 * job.sizes.intermediate
    layer = root + _layers(job) + 2 * 4 * ATTENTION_MASK + tokens * job.itemsize * widths
    tower = root + job.images.forward(sequences) if job.images else 0
    return max(logits + (root if job.dies > 1 else 0), layer, tower)


def _update(job: FsdpJob) -> int:
    """Return an update's peak beside weights and moments: backward of logits, layer or root, or Adam's temporary.

    Gradients are allocated from the last layer to the root, so the logits of a single micro batch come before them.
    """
    tokens, vocabulary = job.micro_update * job.sequence_tokens, job.sizes.vocabulary
    answer, layer = job.response_tokens * vocabulary * 4, _layer_activations(job, tokens)
    inputs = tokens * job.sizes.hidden * job.itemsize * job.sizes.layers
    kept, root = inputs if job.recomputes else job.sizes.layers * layer, job.root * job.itemsize
    tower = job.images.kept(job.micro_update, job.recomputes) if job.images else 0
    kept += tower
    whole = tokens * vocabulary * job.itemsize
    # Log-probs over the vocabulary stay in float32, and with the entropy two more tensors like them. Then come the
    # gradients of the logits, beside the logits themselves if the entropy has kept them.
    answers = whole + (3 if job.entropy else 1) * job.micro_update * answer + 3 * answer
    logits = (root if job.dies > 1 else 0) + kept + max((3 if job.entropy else 2) * whole, answers)
    # The gradient of a unit in the compute type and, before it is reduced, in float32.
    unit = job.layer * (job.itemsize + GRADIENT_BYTES)
    at_work = root + kept + layer + unit + _layers(job) + (2 * 4 + 1) * ATTENTION_MASK
    gradients = job.shard * GRADIENT_BYTES
    tower_at_work = root + tower + job.images.backward(job.micro_update) if job.images else 0
    return max(
        (gradients if job.accumulates else 0) + logits,
        gradients + at_work,
        gradients + tower_at_work,
        gradients + _root_gradient(job),
        gradients + job.shard * MASTER_BYTES,
    )


def _root_gradient(job: FsdpJob) -> int:
    """Return the bytes beside all gradients when the root's is computed: in the compute type, and in float32.

    The float32 copy is reduced, and the result is added to the shard of earlier micro batches. A single die reduces
    nothing: its copy is the gradient, or is added to it while the root is still held in the compute type. FSDP2 ends
    with the unit that has the output layer, whose weights and gradient stay gathered in the compute type until the
    backward is over.
    """
    typed, copy = job.root * job.itemsize, job.root * GRADIENT_BYTES
    gathered = 2 * job.output_layer * job.itemsize if job.by_rows else 0
    if job.dies == 1:
        return gathered + typed + (typed + copy if job.accumulates else 0)
    return gathered + typed + copy + (copy // job.dies if job.accumulates else 0)


def _engine_forward(job: FsdpJob) -> int:
    sizes = job.sizes
    layer = job.forward_tokens * job.itemsize * (2 * sizes.hidden + 3 * sizes.intermediate // job.rollout_tp)
    logits = job.engine_sequences * sizes.vocabulary * (job.itemsize + 4 + 4)
    return max(layer, logits)


def _engine_images(job: FsdpJob) -> int:
    """Return the bytes with which the vision tower encodes the images of a forward, before the decoder begins."""
    return job.images.engine(job.rollout_tp) if job.images else 0


def _kv_bytes_of_token(job: FsdpJob) -> int:
    return job.sizes.layers * job.sizes.cache(job.rollout_tp) * job.itemsize


def _kv_tokens(job: FsdpJob, left: int) -> int:
    if job.blocks is not None:
        return job.blocks * CACHE_BLOCK
    return max(left, 0) // (_kv_bytes_of_token(job) * CACHE_BLOCK) * CACHE_BLOCK
