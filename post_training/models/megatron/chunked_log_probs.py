"""Log-probs and entropy directly from hidden states: the logits exist for one chunk of the vocabulary at a time.

A rank holds `V / TP` rows of the output layer's weight. It computes the logits of some of these rows, in the order of
the vocabulary, reduces them to three numbers per token in float32 and drops them; the backward computes them again.
Every row of the weight meets all tokens in one product, so its gradient is rounded as often as upstream's, and the
gradient of the hidden states is summed in float32. With logits l, m their maximum, s = sum(exp(l - m)) over the
vocabulary:

    log_prob = l[label] - m - log(s)            d log_prob / d l = one_hot(label) - p
    entropy  = log(s) - sum(p * (l - m))        d entropy  / d l = -p * (log(p) + entropy)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers

from post_training.layouts.vocabulary_chunks import chunks, rows_at_once


@dataclass(frozen=True)
class Projection:
    """How hidden states become logits.

    Attributes:
        temperature: the logits are divided by it in float32.
        chunk_bytes: most bytes of float32 logits of one chunk.
        sequence_parallel: every rank holds its part of the tokens, as with Megatron's ColumnParallelLinear.
        fuses_accumulation: weight gradients are added to `main_grad` by Megatron's fused operator.
    """

    temperature: float
    chunk_bytes: int
    sequence_parallel: bool
    fuses_accumulation: bool

    def all_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [all tokens, hidden] of this rank's [tokens, hidden]; valid until Megatron's buffer is used again."""
        if not self.sequence_parallel:
            return hidden
        shape = [hidden.size(0) * parallel_state.get_tensor_model_parallel_world_size(), hidden.size(1)]
        gathered = parallel_state.get_global_memory_buffer().get_tensor(shape, hidden.dtype, "mpu")
        dist.all_gather_into_tensor(gathered, hidden, group=_group())
        return gathered

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return float32 logits at the temperature, first rounded to the weight's type like upstream's."""
        logits = torch.matmul(hidden, weight.t()).float()
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def own_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Add the gradients of all ranks' shards and return those of this rank's tokens."""
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        if ranks > 1 and not self.sequence_parallel:
            dist.all_reduce(gradient, group=_group())
        if not self.sequence_parallel:
            return gradient
        own = gradient.new_empty(gradient.size(0) // ranks, gradient.size(1))
        dist.reduce_scatter_tensor(own, gradient, group=_group())
        return own


def log_probs_and_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, projection: Projection, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the log-prob of each token's label and, if asked for, the entropy of each token.

    Args:
        hidden: [tokens, hidden] of the weight's type; with sequence parallelism [tokens / TP, hidden].
        weight: [vocabulary / TP, hidden], this rank's rows of the output layer.
        labels: [tokens] int64, the same on all ranks. A label outside the vocabulary has the logit of the largest one,
            and no gradient of its own, as in Megatron's cross entropy; callers mask such tokens.
        projection: How hidden states become logits.
        with_entropy: Whether the entropy is computed.

    Returns:
        [tokens] float32 each; None in the place of an entropy that was not asked for.
    """
    log_probs, entropy = _LogProbs.apply(hidden, weight, labels, projection, with_entropy)
    return log_probs, entropy if with_entropy else None


def _group() -> dist.ProcessGroup:
    return parallel_state.get_tensor_model_parallel_group()


@dataclass(frozen=True)
class _Chunk:
    """Rows of the weight, and the labels among them."""

    rows: slice
    columns: torch.Tensor
    """[tokens, 1] int64: the label's column in this chunk, 0 if it is in another one."""
    has_label: torch.Tensor
    """[tokens] bool."""


def _chunks(weight: torch.Tensor, labels: torch.Tensor, projection: Projection) -> Iterator[_Chunk]:
    shard = weight.size(0)
    offset = parallel_state.get_tensor_model_parallel_rank() * shard
    for first, end in chunks(labels.numel(), shard, projection.chunk_bytes):
        columns = labels - (offset + first)
        has_label = (columns >= 0) & (columns < end - first)
        yield _Chunk(slice(first, end), (columns * has_label).unsqueeze(1), has_label)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        projection: Projection,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        maximum, total, own, weighted = _reduced(hidden, weight, labels, projection, entropy)
        log_total = total.log()
        entropies = log_total - weighted / total if entropy else torch.empty_like(total)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        ctx.set_materialize_grads(False)
        ctx.projection, ctx.weight = projection, weight  # the parameter itself: a saved tensor has no main_grad
        ctx.save_for_backward(hidden, labels, maximum + log_total, entropies)
        return own - log_total, entropies

    @staticmethod
    def backward(
        ctx: Any, of_log_probs: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        hidden, labels, log_sum, entropy = ctx.saved_tensors
        if of_log_probs is None:
            of_log_probs = torch.zeros_like(log_sum)
        gradients = _Gradients(ctx.projection, ctx.weight, ctx.projection.all_tokens(hidden), *ctx.needs_input_grad[:2])
        for chunk in _chunks(ctx.weight, labels, ctx.projection):
            logits = ctx.projection.logits(gradients.hidden, ctx.weight[chunk.rows])
            of_logits = _of_logits(logits.sub_(log_sum.unsqueeze(1)), chunk, of_log_probs, of_entropy, entropy)
            del logits
            if ctx.projection.temperature != 1.0:
                of_logits.div_(ctx.projection.temperature)
            gradients.add(chunk.rows, of_logits.to(ctx.weight.dtype))
        return gradients.of_hidden(), gradients.of_weight(), None, None, None


def _reduced(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, projection: Projection, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reduce over the vocabulary, [tokens] each: m, s, the label's l - m, and sum(exp(l - m) * (l - m)) if needed.

    Each chunk is reduced against its own maximum, and rescaled once the maximum over chunks and ranks is known.
    """
    every = projection.all_tokens(hidden)
    found = [_of_chunk(projection.logits(every, weight[chunk.rows]), chunk, entropy) for chunk in
             _chunks(weight, labels, projection)]  # fmt: skip
    maxima, totals, weighted = (torch.stack(each) for each in list(zip(*found, strict=True))[:3])
    maximum = maxima.amax(0)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=_group())
    below = maxima - maximum
    own = sum(torch.where(has_label, logit - maximum, 0.0) for *_, logit, has_label in found)
    scale = below.exp()
    sums = [(totals * scale).sum(0), own]
    if entropy:
        sums.append(((weighted + below * totals) * scale).sum(0))
    reduced = torch.stack(sums)
    dist.all_reduce(reduced, group=_group())
    return maximum, reduced[0], reduced[1], reduced[2] if entropy else reduced[0]


def _of_chunk(logits: torch.Tensor, chunk: _Chunk, entropy: bool) -> tuple[torch.Tensor, ...]:
    """Return maximum, sum of exponentials, their sum weighted by the distance to the maximum, and the label's logit."""
    own = logits.gather(1, chunk.columns).squeeze(1)
    maximum = logits.amax(1)
    logits.sub_(maximum.unsqueeze(1))
    if not entropy:
        total = logits.exp_().sum(1)
        return maximum, total, total, own, chunk.has_label
    exponentials = logits.exp()
    total = exponentials.sum(1)
    return maximum, total, exponentials.mul_(logits).sum(1), own, chunk.has_label


def _of_logits(
    log_p: torch.Tensor,
    chunk: _Chunk,
    of_log_probs: torch.Tensor,
    of_entropy: torch.Tensor | None,
    entropy: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of a chunk's logits in float32; overwrites `log_p`."""
    if of_entropy is None:
        found = log_p.exp_().mul_(-of_log_probs.unsqueeze(1))
    else:
        found = log_p.exp()
        each = log_p.add_(entropy.unsqueeze(1)).mul_(of_entropy.unsqueeze(1)).add_(of_log_probs.unsqueeze(1))
        found.mul_(each).neg_()
    return found.scatter_add_(1, chunk.columns, (of_log_probs * chunk.has_label).unsqueeze(1))


class _Gradients:
    """Gradients of hidden states and weight, chunk after chunk.

    If Megatron's data-parallel wrapper has given the weight a `main_grad`, each chunk is added to its rows in it, and
    no gradient of the whole weight is allocated.
    """

    def __init__(
        self, projection: Projection, weight: torch.Tensor, hidden: torch.Tensor, wants_hidden: bool, wants_weight: bool
    ) -> None:
        self.hidden = hidden
        self._projection, self._weight = projection, weight
        self._of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wants_hidden else None
        self._wants_weight = wants_weight
        self._accumulates = wants_weight and hasattr(weight, "grad_added_to_main_grad")
        self._of_weight = torch.empty_like(weight) if wants_weight and not self._accumulates else None

    def add(self, rows: slice, of_logits: torch.Tensor) -> None:
        """Add the contributions of `of_logits` [tokens, rows], the gradient of the logits of some rows of weight."""
        if self._of_hidden is not None:
            self._add_to_hidden(of_logits, self._weight[rows])
        if self._accumulates:
            self._accumulate(self._weight.main_grad[rows], of_logits, self.hidden)
        elif self._of_weight is not None:
            torch.matmul(of_logits.t(), self.hidden, out=self._of_weight[rows])

    def _add_to_hidden(self, of_logits: torch.Tensor, weight: torch.Tensor) -> None:
        assert self._of_hidden is not None
        if self._projection.fuses_accumulation:  # the operator of weight gradients sums unrounded products
            self._accumulate(self._of_hidden, of_logits.t().contiguous(), weight)
            return
        # The product has the weight's type; it is computed for some rows at a time, so it is no larger than a chunk.
        size = rows_at_once(len(of_logits), weight.size(1) * weight.element_size(), self._projection.chunk_bytes)
        for added, rows in zip(self._of_hidden.split(size), of_logits.split(size), strict=True):
            added.add_(torch.matmul(rows, weight))

    def _accumulate(self, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left^T right to `total`."""
        if not self._projection.fuses_accumulation:
            total.add_(torch.matmul(left.t(), right))
        elif total.dtype == torch.float32:
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(right, left, total)
        else:
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(right, left, total)

    def of_hidden(self) -> torch.Tensor | None:
        """Return the gradient of this rank's hidden states in their type."""
        if self._of_hidden is None:
            return None
        gradient, self._of_hidden = self._of_hidden.to(self.hidden.dtype), None
        return self._projection.own_gradient(gradient)

    def of_weight(self) -> torch.Tensor | None:
        """Return the weight's gradient; None if it is in `main_grad`, which Megatron's hook learns from a flag."""
        if self._accumulates:
            self._weight.grad_added_to_main_grad = True
        return self._of_weight
