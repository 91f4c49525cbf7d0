"""The expert numbers that come with samples, as verl's jagged tensors, and which of them training may use."""

from __future__ import annotations

from typing import Any

import torch


def known_rows(input_ids: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return which tokens the rollout computed, jagged bool like `input_ids`: all but the last one of an answer.

    A sample without an answer, such as verl's padding, has none.
    """
    offsets = input_ids.offsets()
    known = torch.ones(int(offsets[-1]), dtype=torch.bool, device=offsets.device)
    known[offsets[1:] - 1] = False
    answered = (response_mask.sum(dim=-1) > 0).to(offsets.device)
    known &= answered.repeat_interleave(offsets.diff())
    return torch.nested.nested_tensor_from_jagged(known, offsets=offsets)


class TakenApart:
    """A jagged tensor that is split into its samples once, for functions that index one sample after another.

    torch computes the bounds of all samples each time that one is asked for, in Python: half a millisecond of a core
    (docs/upstream/verl-jagged-padding.md).
    Everything but `[number]` is the tensor's own.
    """

    def __init__(self, samples: torch.Tensor) -> None:
        self._samples, self._rows = samples, samples.unbind()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._rows[number]


def checked(experts: torch.Tensor, input_ids: torch.Tensor, known: torch.Tensor, model: Any) -> None:
    """Check the expert numbers of samples, jagged [samples, tokens, layers, experts per token].

    Raises:
        ValueError: the numbers do not belong to these samples and this model (a configuration of transformers), or the
            rollout recorded none.
    """
    lengths, tokens = experts.offsets().diff().tolist(), input_ids.offsets().diff().tolist()
    if lengths != tokens:
        raise ValueError(f"routing replay: samples of {tokens} tokens came with the experts of {lengths} tokens.")
    values, shape = experts.values(), (model.num_hidden_layers, model.num_experts_per_tok)
    if tuple(values.shape[1:]) != shape:
        raise ValueError(
            f"routing replay: a token came with experts of shape {tuple(values.shape[1:])}, but the model has {shape}: "
            "layers, experts per token."
        )
    most, count = int(values.max()), number_of_experts(model)
    if most >= count:
        raise ValueError(f"routing replay: a token came with expert {most}, but the model has {count}.")
    if most == 0 and bool(known.values().any()):
        raise ValueError(
            "routing replay: the rollout recorded no experts. vLLM-Ascend 0.23 records them only for weights that are "
            "not quantised. Remove actor_rollout_ref.rollout.quantization."
        )


def number_of_experts(model: Any) -> int:
    """Return the number of routed experts in a layer; 0 for a dense model."""
    return getattr(model, "num_experts", None) or getattr(model, "n_routed_experts", None) or 0
