"""What decides the time of a step: the job, and the cluster that it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from post_training.models.families import sizes_of
from post_training.models.sizes import ModelSizes

Agreements = Literal["gloo", "hccl"]
DataPath = Literal["driver", "shared", "dies"]
"""The driver serializes a batch's part for every rank, once for all ranks that take it, or parts go from die to die."""
OPTIMIZATIONS = ("graphs", "transpose and cumsum", "streams", "exchange", "KV cache in NZ")
"""The recipe's, of a decode step: its sections 6.1, 6.5, 6.2, 6.3 and 6.4."""
BFLOAT16 = 2
SPREAD = 0.6
"""Of the logarithm of an answer's length. LONG (see published.toml) draws 256 answers of a rank (2.1) and 6520 of a
step (3.2) of Qwen3-235B to DeepScaleR: 0.65 and 0.57. DeepSeek-V3's to OpenR1-Math have 1.05 (its picture in
section 2.3.1)."""
ALIKE = 0.7
"""Chosen, to one digit, on the published gain of samples on many ranks over samples side by side (LONG, in
section 2.3.3)."""


@dataclass(frozen=True)
class Cluster:
    """dies: all of them, from 1 to 4096."""

    dies: int


@dataclass(frozen=True)
class StepJob:
    """Tokens, sequences and layers are counts.

    prompt_tokens, response_tokens: means of a sequence. longest_prompt, longest: the limits, which batches are padded
    to. rollout_ep: dies of an instance. engine_sequences: that a rollout rank (tp dies) decodes at a time, at most.
    graph_sizes: of the graphs that decode steps run in. rebalanced: unfinished sequences change ranks, so that all
    ranks run the smallest graph that they can. dp, micro, micro_reference: data-parallel ranks of the training, and
    sequences of a micro batch. stage_layers, recomputed: layers of the largest pipeline stage, and those of them that
    are recomputed. old_log_prob: it has a forward of its own. balanced: every expert gets as many tokens. data: how
    batches reach the ranks. agreements: the back-end of agreements between rollout ranks; a_forward: how many a decode
    step has. without: those of OPTIMIZATIONS that are off.

    Lengths of answers are log-normal and cut at `longest`. spread: standard deviation of their logarithm. alike: the
    share of its square that the samples of a prompt have in common. samples: answers of a prompt, which lie on one
    rank, or on different ones if `interleaved`. rebalance_every: decode steps between two looks at what should change
    ranks. empty_rows_routed: rows of a graph without a sequence go to experts like tokens, all to the same ones, as in
    vLLM-Ascend before its pull request 1642 of July 2025.
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
        """Raises ValueError for a model without a formula."""
        return sizes_of(self.model)

    def rollout_ranks(self, cluster: Cluster) -> int:
        return max(1, cluster.dies // self.rollout_tp)


@dataclass(frozen=True)
class Weights:
    """Bytes in bfloat16. experts: of all routed experts. others: of everything else that a token is multiplied with."""

    experts: int
    others: int

    def in_rollout(self, job: StepJob) -> float:
        """Of one die."""
        return self.experts / job.rollout_ep + self.others / job.rollout_tp

    def in_training(self, cluster: Cluster, job: StepJob) -> float:
        """Of one die: experts are divided over all ranks of a stage, the rest over its tensor-parallel ones."""
        return self.experts / cluster.dies + self.others * job.dp / cluster.dies


def weights_of(sizes: ModelSizes) -> Weights:
    layers = sizes.layers - sizes.dense_layers
    one = 3 * sizes.hidden * sizes.expert_width * layers * BFLOAT16
    return Weights(experts=one * sizes.experts, others=sizes.weights_met * BFLOAT16 - one * sizes.experts_per_token)
