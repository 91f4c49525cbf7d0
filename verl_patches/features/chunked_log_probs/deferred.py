"""Deferred logits: hidden states that verl handles in the place of logits, before the output layer projects them.

Megatron's model applies its output layer, and verl takes log-probs and entropy of the logits afterwards, in a function
of its own. Only the division by a temperature happens in between, so the output layer passes its input through, and
verl's functions get an object of the logits' shape that computes both in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Processor = Callable[..., Any]


class DeferredLogits:
    """Stands for logits [batch, tokens, vocabulary / TP] of which only log-probs and entropy are asked.

    Args:
        hidden: [batch, tokens, hidden] as Megatron's model returns it; with sequence parallelism [batch, tokens / TP,
            hidden]. In float32, as Megatron converts outputs of a bfloat16 model, which is exact.
        weight: of the output layer.
        labels: [batch, tokens] int64, with which `log_probs` will be called.
        layer: the output layer.
        chunk_bytes: most bytes of float32 logits of one chunk.
    """

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, layer: nn.Module, chunk_bytes: int
    ) -> None:
        self.shape = torch.Size([*labels.shape, weight.size(0)])
        self._hidden, self._weight, self._labels, self._layer = hidden, weight, labels, layer
        self._chunk_bytes = chunk_bytes
        self._temperature = 1.0
        self._found: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def div_(self, temperature: float) -> DeferredLogits:
        """Divide the logits by a temperature, as the feature temperature does."""
        self._temperature *= temperature
        return self

    def entropy(self) -> torch.Tensor:
        """Return [batch, tokens] float32; the log-probs are computed in the same pass."""
        self._found = self._compute(with_entropy=True)
        assert self._found[1] is not None
        return self._found[1]

    def log_probs(self, labels: torch.Tensor) -> torch.Tensor:
        """Return [batch, tokens] float32 of the labels that the object was made with.

        Raises:
            ValueError: these are other labels.
        """
        if labels is not self._labels:
            raise ValueError("deferred logits were asked for log-probs of labels from another micro batch")
        return (self._found or self._compute(with_entropy=False))[0]

    def _compute(self, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        from post_training.models.megatron.chunked_log_probs import Projection, log_probs_and_entropy

        # Megatron's order is [tokens, batch, hidden], in which sequence parallelism divides the tokens.
        hidden = self._hidden.transpose(0, 1).to(self._weight.dtype).flatten(0, 1).contiguous()
        projection = Projection(
            temperature=self._temperature,
            chunk_bytes=self._chunk_bytes,
            sequence_parallel=self._layer.sequence_parallel,
            fuses_accumulation=self._layer.gradient_accumulation_fusion,
        )
        labels = self._labels.t()
        found = log_probs_and_entropy(
            hidden, self._weight, labels.flatten(), projection, with_entropy=with_entropy
        )  # fmt: skip
        log_probs, entropy = (None if each is None else each.view_as(labels).t() for each in found)
        assert log_probs is not None
        return log_probs, entropy


def output_layer(model: Any) -> nn.Module | None:
    """Return the output layer whose logits can be deferred; None if the stage has none or something else needs them.

    Args:
        model: a chunk of Megatron's model as verl calls it, in its wrappers.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from verl.utils.megatron_utils import unwrap_model

    layer = getattr(unwrap_model(model), "output_layer", None)
    # Others add something to the logits: MindSpeed-LLM's segments, a critic's head.
    if layer is None or type(layer) is not ColumnParallelLinear or layer.bias is not None or layer.gather_output:
        return None
    # Megatron keeps the layer's input for a weight gradient of its own; hooks read the logits (compare_log_probs.py).
    if layer.config.defer_embedding_wgrad_compute or layer._forward_hooks or "forward" in vars(layer):
        return None
    # If gradient reduction overlaps, Megatron's hook that adds the weight's gradient to main_grad needs a gradient.
    overlaps = getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False)
    return None if overlaps else layer


@contextmanager
def deferring(model: Any, processor: Processor, chunk_bytes: int) -> Iterator[Processor]:
    """Let the model return hidden states within this context; yields the processor for verl, which takes them as
    logits.

    Args:
        model: as for `output_layer`; if that returns None, nothing is deferred.
        processor: verl's function of logits, with the labels under the name `label`.
        chunk_bytes: most bytes of float32 logits of one chunk.
    """
    layer = output_layer(model)
    if layer is None:
        yield processor
        return
    weights: list[torch.Tensor] = []

    def hand_through(input_: torch.Tensor, weight: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        weights[:] = [layer.weight if weight is None else weight]  # its own, or the embedding's
        return input_, None

    def of_hidden_states(hidden: torch.Tensor, *, label: torch.Tensor, **others: Any) -> Any:
        (weight,) = weights
        return processor(DeferredLogits(hidden, weight, label, layer, chunk_bytes), label=label, **others)

    # Set on the object, which precedes the class's method, Megatron's own or MindSpeed's replacement.
    vars(layer)["forward"] = hand_through
    try:
        yield of_hidden_states
    finally:
        del vars(layer)["forward"]
