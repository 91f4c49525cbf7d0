"""Inputs of the step-time model: the job, and the cluster that it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from post_training.models.families import sizes_of
from post_training.models.sizes import ModelSizes

Agreements = Literal["gloo", "hccl"]
DataPath = Literal["driver", "shared", "dies"]
"""The driver serializes a batch's part once for every rank, or once for all ranks that take it; or dies exchange parts.
"""
OPTIMIZATIONS = ("graphs", "transpose and cumsum", "streams", "exchange", "KV cache in NZ")
"""The recipe's optimizations of a decode step, from its sections 6.1, 6.5, 6.2, 6.3 and 6.4."""
BFLOAT16 = 2
SPREAD = 0.6
"""Standard deviation of the logarithm of an answer's length. LONG (see published.toml) plots Qwen3-235B's answers to
DeepScaleR: 256 of a rank (2.1) have 0.65, 6520 of a step (3.2) have 0.57. DeepSeek-V3's answers to OpenR1-Math have
1.05 (its picture in section 2.3.1)."""
ALIKE = 0.7
"""Chosen to one digit to match the published gain of spreading a prompt's samples over ranks (LONG, section 2.3.3)."""


@dataclass(frozen=True)
class Cluster:
    """A cluster of `dies` dies, from 1 to 4096."""

    dies: int


@dataclass(frozen=True)
class StepJob:
    """The step of a job. Tokens, sequences and layers are counts; answer lengths are log-normal and cut at `longest`.

    Attributes:
        model: values of the model's config.json.
        sequences: of a step.
        prompt_tokens, response_tokens: means of a sequence.
        longest, longest_prompt: limits, to which batches are padded.
        rollout_ep: dies of an instance.
        engine_sequences: most sequences that a rollout rank (tp dies) decodes at a time.
        graph_sizes: of the graphs in which decode steps run.
        rebalanced: unfinished sequences migrate, so that all ranks run the smallest possible graph.
        rebalance_every: decode steps between two checks for such migrations.
        empty_rows_routed: rows of a graph without a sequence go to experts like tokens, all to the same ones, as in
            vLLM-Ascend before its pull request 1642 of July 2025.
        samples: answers to a prompt, which lie on one rank, or on different ones if `interleaved`.
        spread: standard deviation of the logarithm of an answer's length.
        alike: share of that variance that the samples of a prompt have in common.
        dp: data-parallel ranks of training.
        micro, micro_reference: sequences in a micro batch.
        stage_layers, recomputed: layers of the largest pipeline stage, and number of them that are recomputed.
        old_log_prob: whether old log-probs have a forward of their own.
        balanced: every expert gets the same number of tokens.
        data: the way in which batches reach the ranks.
        agreements: backend with which rollout ranks synchronise.
        a_forward: number of such synchronisations in a decode step.
        without: the entries of OPTIMIZATIONS that are off.
    """

    model: Mapping[str, Any]
    sequences: int
    prompt_tokens: float
    response_tokens: float
    longest: int
    longest_prompt: int = 1024
    rollout_tp: int = 2
    rollout_ep: int = 256
    engine_sequences: int = 64
    graph_sizes: tuple[int, ...] = (64,)
    rebalanced: bool = False
    rebalance_every: int = 16
    empty_rows_routed: bool = False
    samples: int = 16
    spread: float = SPREAD
    alike: float = ALIKE
    interleaved: bool = False
    pp: int = 8
    dp: int = 8
    micro: int = 1
    micro_reference: int = 8
    stage_layers: int = 8
    recomputed: int = 0
    old_log_prob: bool = False
    balanced: bool = True
    data: DataPath = "driver"
    agreements: Agreements = "hccl"
    a_forward: float = 2.0
    without: tuple[str, ...] = ()

    @property
    def sizes(self) -> ModelSizes:
        """The model's sizes. Raises ValueError for a model without a formula."""
        return sizes_of(self.model)

    def rollout_ranks(self, cluster: Cluster) -> int:
        return max(1, cluster.dies // self.rollout_tp)


@dataclass(frozen=True)
class Weights:
    """Bytes of weights in bfloat16.

    Attributes:
        experts: all routed experts.
        others: all other weights with which a token is multiplied.
    """

    experts: int
    others: int

    def in_rollout(self, job: StepJob) -> float:
        """Return the bytes of one die."""
        return self.experts / job.rollout_ep + self.others / job.rollout_tp

    def in_training(self, cluster: Cluster, job: StepJob) -> float:
        """Return the bytes of one die: experts are sharded over all ranks of a stage, the rest over tensor ranks."""
        return self.experts / cluster.dies + self.others * job.dp / cluster.dies


def weights_of(sizes: ModelSizes) -> Weights:
    layers = sizes.layers - sizes.dense_layers
    one = 3 * sizes.hidden * sizes.expert_width * layers * BFLOAT16
    return Weights(experts=one * sizes.experts, others=sizes.weights_met * BFLOAT16 - one * sizes.experts_per_token)
