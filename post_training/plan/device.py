"""Device memory of a die by phase, in bytes.

Weights, gradients, optimizer state, KV cache and staging are nearly all of it; they follow from the layouts and from
the code of Megatron, vLLM-Ascend and the offload manager. Activations are estimated from the largest tensors. Terms
that do not grow with the model are constants, measured on the emulated NPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from post_training.layouts.layout import EXPERT_MARK, Shard
from post_training.plan.activations import logits, training_activations
from post_training.plan.job import Job
from post_training.plan.outside_torch import NOTHING_OUTSIDE, OutsideTorch

# Elements of vLLM-Ascend's masks: one in bytes, which stays after a prompt was cut into chunks, and one in the model's
# type.
CHUNK_MASK, PREFILL_MASK = 2048 * 2048, 512 * 512
# Upper bound of its workspace's rows for the cached context of chunks: eight full sequences, or four blocks a sequence.
WORKSPACE_ROWS = 128 * 1024
# Input buffers of the engine, random states, rotary tables of training: measured, and small beside any real model.
SMALL_BUFFERS = 100_000
# Megatron's gradients, Adam's main parameters and two moments are in float32.
GRADIENT_BYTES, MAIN_BYTES, MOMENT_BYTES = 4, 4, 8
# vLLM-Ascend allocates this many extra elements for each part of a layer's cache, to align it.
CACHE_ALIGNMENT = 2 * 1024 * 1024
CACHE_BLOCK = 128


@dataclass(frozen=True)
class Rank:
    """Numbers of elements on one rank: dense weights and routed experts."""

    dense: int
    experts: int

    @classmethod
    def of(cls, shards: list[Shard]) -> Rank:
        sizes = [(prod(shard.extents), EXPERT_MARK in shard.hf_name) for shard in shards]
        return cls(sum(size for size, expert in sizes if not expert), sum(size for size, expert in sizes if expert))

    @property
    def elements(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True)
class DeviceMemory:
    """Peak bytes of the die that needs most, by phase, and their parts.

    Attributes:
        outside: memory of HCCL and CANN beside tensors, in every phase.
        phases: tensors only, as torch counts them.
        kv_tokens: number of tokens that fit into the KV cache; all other fields are bytes.
    """

    weights_training: int
    weights_rollout: int
    rotary_tables: int
    gradients: int
    optimizer: int
    kv_cache: int
    kv_tokens: int
    staging: int
    outside: int
    phases: dict[str, int]
    critic_weights: int = 0
    critic_optimizer: int = 0

    @property
    def host(self) -> int:
        """Bytes of host memory that the offload manager needs for a die.

        These are the training weights, those of the reference policy, the optimizer's state, a critic's weights and
        state, and the rollout's rotary tables, which no reshard writes.
        """
        critic = self.critic_weights + self.critic_optimizer
        return 2 * self.weights_training + self.optimizer + critic + self.rotary_tables


def device_memory(job: Job, die_bytes: int, staging: int, outside: OutsideTorch = NOTHING_OUTSIDE) -> DeviceMemory:
    """Compute the memory of every phase for dies of `die_bytes`; `staging` is the reshard's peak beside the weights."""
    stages = [_stage_rank(job, stage) for stage in range(job.train.pp)]
    rollout = Rank.of(job.table.vllm_ascend(job.rollout, 0))
    served = rollout.elements * job.itemsize + _rollout_buffers(job)
    tokens = _kv_tokens(job, die_bytes, served + outside.when_the_engine_is_built(job))
    cache = tokens * _kv_bytes_of_token(job) + 2 * job.table.layers * CACHE_ALIGNMENT * job.itemsize
    fixed = _engine_buffers(job) + (CHUNK_MASK if job.chunks_prompts and job.sizes.mla else 0)
    weights = [rank.elements * job.itemsize for rank in stages]
    critics = [_stage_rank(job.critic, stage) for stage in range(job.train.pp)] if job.critic else []
    return DeviceMemory(
        weights_training=max(weights),
        weights_rollout=rollout.elements * job.itemsize,
        rotary_tables=_rotary_tables(job),
        gradients=max(rank.elements for rank in stages) * GRADIENT_BYTES,
        optimizer=max(_optimizer(job, rank) for rank in stages),
        kv_cache=cache,
        kv_tokens=tokens,
        staging=staging,
        outside=outside.at_most(job),
        phases={
            "idle": fixed + served,
            "reshard": fixed + max(weights) + served + staging,
            "rollout": fixed + served + cache + _forward(job, job.forward_tokens, job.rollout.tp),
            "ref": fixed + max(_forward_phase(job, rank, stage) for stage, rank in enumerate(stages)),
            **({} if job.critic is None else _critics_phases(job.critic, critics, fixed)),
            "update": fixed + max(_update(job, rank, stage) for stage, rank in enumerate(stages)),
        },
        critic_weights=max((rank.elements * job.itemsize for rank in critics), default=0),
        critic_optimizer=max((_optimizer(job, rank) for rank in critics), default=0),
    )


def _critics_phases(critic: Job, stages: list[Rank], fixed: int) -> dict[str, int]:
    """Return the peaks of the phases in which a critic works; in all others it is offloaded to the host."""
    return {
        "values": fixed + max(_forward_phase(critic, rank, stage) for stage, rank in enumerate(stages)),
        "update_critic": fixed + max(_update(critic, rank, stage) for stage, rank in enumerate(stages)),
    }


def _forward_phase(job: Job, rank: Rank, stage: int) -> int:
    return rank.elements * job.itemsize + _reference_forward(job, stage)


def _stage_rank(job: Job, stage: int) -> Rank:
    ranks = (rank for rank in range(job.train.world_size) if job.train.pp_rank(rank) == stage)
    return Rank.of(job.table.megatron(job.train, next(ranks)))


def _optimizer(job: Job, rank: Rank) -> int:
    """Return the bytes of a rank's main parameters and moments, sharded over its data-parallel replicas.

    In float32 the weights themselves are the main parameters.
    """
    each = MOMENT_BYTES + (0 if job.itemsize == 4 else MAIN_BYTES)
    return each * sum(_shares(job, rank))


def _shares(job: Job, rank: Rank) -> tuple[int, int]:
    """Return the numbers of elements of dense weights and of experts that a rank's optimizer updates."""
    return rank.dense // job.train.dp, rank.experts // max(job.train.dp // job.train.ep, 1)


def _update(job: Job, rank: Rank, stage: int) -> int:
    """Return weights, gradients, optimizer, and the larger of activations and Adam's temporary of one optimizer."""
    state = rank.elements * (job.itemsize + GRADIENT_BYTES) + (0 if job.swaps_optimizer else _optimizer(job, rank))
    step = 4 * max(_shares(job, rank))
    return state + max(training_activations(job, stage), 0 if job.swaps_optimizer else step)


def _reference_forward(job: Job, stage: int) -> int:
    """Return the bytes of one running layer and, on the last stage, of the logits.

    Both count, because the layer's memory is still in the allocator's cache when the logits follow.
    """
    tokens = job.training_tokens(job.micro_reference)
    return logits(job, stage, tokens) + _forward(job, tokens, job.train.tp)


def _forward(job: Job, tokens: int, tp: int) -> int:
    """Return the bytes of a layer's largest tensors: before, in and after the MLP, with a token's copy per expert."""
    sizes = job.sizes
    if not sizes.experts:
        return tokens * job.itemsize * (2 * sizes.hidden + 3 * sizes.intermediate // tp)
    copies = tokens * sizes.experts_per_token // tp
    return copies * job.itemsize * (2 * sizes.hidden + 2 * sizes.expert_width)


def _kv_bytes_of_token(job: Job) -> int:
    return job.table.layers * job.sizes.cache(job.rollout.tp) * job.itemsize


def _kv_tokens(job: Job, die_bytes: int, taken: int) -> int:
    """Return the tokens in the KV cache: as configured, or as many as fit into the rest of the engine's share of a die.

    vLLM-Ascend subtracts torch's peak in a forward from that share, and all other memory in use on the die: `taken`
    is weights, communicators and CANN's own (`determine_available_memory` of its worker).
    """
    if job.blocks is not None:
        return job.blocks * CACHE_BLOCK
    left = (
        int(die_bytes * job.utilization)
        - taken
        - _engine_buffers(job)
        - _forward(job, job.forward_tokens, job.rollout.tp)
    )
    return max(left, 0) // (_kv_bytes_of_token(job) * CACHE_BLOCK) * CACHE_BLOCK


def _engine_buffers(job: Job) -> int:
    """Return the bytes that the engine holds in every phase: a mask, and the workspace of chunked prefills."""
    if not job.sizes.mla:
        # A mask of the longest sequence; other attention has no workspace of its own.
        return SMALL_BUFFERS + job.sequence_tokens**2 * job.itemsize
    size = SMALL_BUFFERS + PREFILL_MASK * job.itemsize
    if job.chunks_prompts:
        rows = max(8 * job.sequence_tokens, 4 * job.engine_sequences * CACHE_BLOCK)
        size += min(rows, WORKSPACE_ROWS) * job.sizes.cache_whole * job.itemsize
    return size


def _rollout_buffers(job: Job) -> int:
    """Return the bytes of MLA's absorbed copies of kv_b_proj, and of rotary tables."""
    absorbed = job.sizes.rollout_attention // job.rollout.tp
    return absorbed * job.table.layers * job.itemsize + _rotary_tables(job)


def _rotary_tables(job: Job) -> int:
    return job.sizes.rotary * job.itemsize
