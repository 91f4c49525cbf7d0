"""Records which experts Megatron's model chooses in the pass whose log-probs are compared with the rollout's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from post_training.layouts.placements import train_placement
from post_training.mismatch.recording import recorded_training_choices
from verl_patches.features.expert_sets.keys import prefix_keys
from verl_patches.features.expert_sets.records import TrainingChoiceRecorder, process_choices


class MicroBatches:
    """The micro batches of one pass of a model; tells `recorder` the keys of their packed rows."""

    def __init__(self, recorder: TrainingChoiceRecorder, share: float) -> None:
        self._recorder, self._share = recorder, share

    @contextmanager
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, alignment: int) -> Iterator[None]:
        """Record the forward of a micro batch within this context: [sequences, length] and the mask of its tokens.

        verl packs sequences end to end, each padded to a multiple of `alignment`.
        """
        sequences = zip(input_ids.cpu().numpy(), attention_mask.bool().cpu().numpy(), strict=True)
        keys = [prefix_keys(tokens[mask]) for tokens, mask in sequences]
        self._recorder.begin_packed(keys, [-len(own) % alignment for own in keys], self._share)
        try:
            yield
        finally:
            self._recorder.end()


@contextmanager
def recorded_pass(chunks: list[nn.Module], transformer_config: Any, share: float) -> Iterator[None]:
    """Record the choices of the routers in this rank's Megatron model chunks, in the forwards within this context.

    Recomputation in backward comes between forwards, when nothing is recorded.
    """
    rank = torch.distributed.get_rank()
    placement = train_placement(transformer_config)
    choices = process_choices()
    if not choices.watched:
        yield
        return
    slots = placement.layers(rank)
    choices.training.records_ties = transformer_config.params_dtype == torch.float32
    with recorded_training_choices(chunks, slots, placement.tp_rank(rank), placement.tp, choices.training):
        choices.of_pass = MicroBatches(choices.training, share).forward
        try:
            yield
        finally:
            choices.of_pass = None


def micro_batch(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    """Return a context for the forward of this micro batch; it does nothing outside a recorded pass."""
    forward = process_choices().of_pass
    if forward is None:
        return nullcontext()
    from megatron.core import parallel_state

    return forward(input_ids, attention_mask, parallel_state.get_tensor_model_parallel_world_size())
