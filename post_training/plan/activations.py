"""Activation memory of a training step on a pipeline stage, with every kind of recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from post_training.layouts.vocabulary_chunks import chunk_width
from post_training.plan.job import Job


@dataclass(frozen=True)
class StageActivations:
    """Bytes of one micro batch on a stage.

    Attributes:
        kept: from the forward to the backward.
        at_work: the most that the backward adds.
    """

    kept: int
    at_work: int


def training_activations(job: Job, stage: int) -> int:
    """Return the bytes at the peak of an update: kept activations of all micro batches in flight, and one backward.

    Megatron alternates one forward and one backward (1F1B, arXiv:2104.04473): stage s of p has p - s micro batches in
    flight. With 3 stages of 2 layers that keep 10 each, and recomputation off, the first stage keeps 3 x 20.
    """
    tokens = job.training_tokens(job.micro_update)
    one = _stage(job, stage, tokens)
    return (job.train.pp - stage) * one.kept + one.at_work + _head(job, stage, tokens) + _ring(job, tokens)


def _ring(job: Job, tokens: int) -> int:
    """Return the bytes of keys and values that a layer's backward passes on between ranks that share sequences.

    MindSpeed's ring attention has five sets of them beside the layer's own: the next rank's and the next but one's
    gradients, its own gradients, and two of the other ranks' keys and values (`AttentionWithCp.backward` and
    `ContextParallelKVCache` of core_r0.16.0). The forward has two besides a copy of its own.
    """
    return 0 if job.context == 1 else 5 * tokens * job.sizes.keys_values // job.train.tp * job.itemsize


def _stage(job: Job, stage: int, tokens: int) -> StageActivations:
    """Return the activations of a stage by method of recomputation.

    K are the activations that a layer keeps, I is its input. Every backward adds the gradients of one layer.

    - none, or `selective`: every layer keeps K. `selective` recomputes the core attention, whose fused operator keeps
      inputs and output either way.
    - full, `block`, n: the first n layers of a stage keep I, the others K. The backward of the n-th layer recomputes
      its K when those of the others are released.
    - full, `uniform`, n: every group of n layers keeps the I of its first layer. The backward of a group recomputes
      the K of all its layers.
    """
    first = sum(job.train.num_layer_list[:stage])
    layers = range(first, first + job.train.num_layer_list[stage])
    whole = [_kept_by_layer(job, layer, tokens) for layer in layers]
    inputs = tokens // job.train.tp * job.sizes.hidden * job.itemsize
    gradients = _gradients(job, tokens)
    how = job.recomputation
    if how is None or how.granularity == "selective" or not whole:
        return StageActivations(sum(whole), gradients)
    if how.method == "uniform":
        groups = [sum(whole[start : start + how.layers]) for start in range(0, len(whole), how.layers)]
        return StageActivations(len(groups) * inputs, max(groups) + gradients)
    again, others = whole[: how.layers], whole[how.layers :]
    kept = len(again) * inputs + sum(others)
    return StageActivations(kept, max(max(again) - sum(others), 0) + gradients)


def _gradients(job: Job, tokens: int) -> int:
    """Return the bytes of the gradients of a layer's largest tensors.

    With experts these are the rows that are returned, those that arrived, both sides of the two matrices, and the
    activations in between.
    """
    sizes = job.sizes
    if not sizes.experts:
        return tokens * job.itemsize * (sizes.hidden + 3 * sizes.intermediate // job.train.tp)
    rows = tokens * sizes.experts_per_token // job.train.tp
    return rows * job.itemsize * (4 * sizes.hidden + 3 * sizes.expert_width)


def _kept_by_layer(job: Job, layer: int, tokens: int) -> int:
    """Return the bytes that a layer keeps for its backward: inputs of norms and matrices, attention, and inner MLP."""
    sizes, tp = job.sizes, job.train.tp
    attention = 4 * sizes.hidden // tp + sizes.kept_whole + sizes.kept_by_heads // tp
    if layer < sizes.dense_layers:
        return tokens * job.itemsize * (attention + (sizes.hidden + 3 * sizes.intermediate) // tp)
    shared = (sizes.hidden + 3 * sizes.shared_width) // tp
    # The router's input and the scores of all experts, in float32; for every copy of a token four indices of eight
    # bytes, the row that an expert receives, and the row that it returns, in the type in which it is weighted.
    router = tokens // tp * (sizes.hidden + sizes.experts * 2) * 4
    copies = tokens * sizes.experts_per_token // tp
    returned = sizes.hidden * (4 if job.weighs_in_float32 else job.itemsize)
    rows = copies * (job.itemsize * (sizes.hidden + 3 * sizes.expert_width) + returned + 4 * 8)
    return tokens * job.itemsize * (attention + shared) + router + rows


def _head(job: Job, stage: int, tokens: int) -> int:
    """Return the bytes after the last layer: logits, their gathered input, and input and output of the last norm.

    With logits in chunks the gradient of the gathered input is accumulated in float32.
    """
    if stage < job.train.pp - 1:
        return 0
    inputs = tokens * job.sizes.hidden * job.itemsize
    summed = 0 if job.log_prob_chunk_bytes is None else tokens * job.sizes.hidden * 4
    return logits(job, stage, tokens) + inputs + 2 * inputs // job.train.tp + summed


def logits(job: Job, stage: int, tokens: int) -> int:
    """Return the bytes of the logits; 0 except on the last stage."""
    if stage < job.train.pp - 1:
        return 0
    return logits_at_once(tokens, job.sizes.vocabulary // job.train.tp, job.itemsize, job.log_prob_chunk_bytes)


def logits_at_once(tokens: int, vocabulary: int, itemsize: int, chunk_bytes: int | None) -> int:
    """Return the bytes of the logits that exist together: as computed, in float32, and their exponentials.

    Args:
        tokens: number of tokens in a micro batch.
        vocabulary: number of vocabulary entries on a rank.
        itemsize: bytes of one number of the model.
        chunk_bytes: upper bound of a chunk's float32 logits; None if all logits are computed at once.
    """
    columns = vocabulary if chunk_bytes is None else chunk_width(tokens, vocabulary, chunk_bytes)
    return tokens * columns * (itemsize + 4 + 4)
