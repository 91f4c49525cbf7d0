"""Extends verl's training engines on NPUs: their ranks send heartbeats, with a phase and with progress in it.

    actor_rollout_ref.model.external_lib=[...,verl_plugin.heartbeats.engines]

It comes last, or before `phase_peaks`: a method that another module puts in place of an engine's would not call it.

A unit of progress is a micro batch's forward, its backward, a step of the optimizer, or a bucket of weights that is
handed over. A checkpoint, and building the model, are one unit each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from post_training.hang_detection.progress import count_optimizer_steps, finished_forward
from post_training.hang_detection.signs import process_signs
from verl_plugin.alltoallv.export import OfferedWeights
from verl_plugin.engines import extend_engine, has_engine
from verl_plugin.heartbeats.sending import start

INIT, CHECKPOINT, RESHARD, UPDATE, REF, OLD_LOG_PROB = "init", "checkpoint", "reshard", "update", "ref", "old_log_prob"


class Heartbeats:
    """Mixin that `extend_engine` puts before a training engine of verl."""

    engine_config: Any

    def initialize(self) -> None:
        """As upstream."""
        start(str(dist.get_rank()))
        count_optimizer_steps()
        with process_signs().phase(INIT):
            super().initialize()  # type: ignore[misc]  # of the engine that this extends

    def train_mode(self, **named: Any) -> Any:
        """As upstream."""
        return _in_phase(UPDATE, super().train_mode(**named))  # type: ignore[misc]  # of the engine

    def eval_mode(self, **named: Any) -> Any:
        """As upstream."""
        phase = REF if self.engine_config.forward_only else OLD_LOG_PROB
        return _in_phase(phase, super().eval_mode(**named))  # type: ignore[misc]  # of the engine

    def forward_step(self, *arguments: Any, **named: Any) -> Any:
        """As upstream. The first element of the result is a micro batch's output or loss."""
        found = super().forward_step(*arguments, **named)  # type: ignore[misc]  # of the engine
        finished_forward(found[0])
        return found

    def get_per_tensor_param(self, **named: Any) -> Any:
        """As upstream."""
        weights, more = super().get_per_tensor_param(**named)  # type: ignore[misc]  # of the engine
        if isinstance(weights, OfferedWeights):
            return OfferedWeights(weights.training, lambda: _handed_over(iter(weights))), more
        return _handed_over(weights), more

    def save_checkpoint(self, *arguments: Any, **named: Any) -> Any:
        """As upstream."""
        with process_signs().phase(CHECKPOINT):
            return super().save_checkpoint(*arguments, **named)  # type: ignore[misc]  # of the engine

    def load_checkpoint(self, *arguments: Any, **named: Any) -> Any:
        """As upstream."""
        with process_signs().phase(CHECKPOINT):
            return super().load_checkpoint(*arguments, **named)  # type: ignore[misc]  # of the engine


@contextmanager
def _in_phase(name: str, mode: Any) -> Iterator[Any]:
    with process_signs().phase(name), mode as entered:
        yield entered


def _handed_over(weights: Iterator[Any]) -> Iterator[Any]:
    with process_signs().phase(RESHARD):
        for each in weights:
            yield each
            process_signs().progress()


for _backend in ("fsdp2", "megatron"):
    if has_engine(_backend):
        extend_engine(_backend, Heartbeats)
