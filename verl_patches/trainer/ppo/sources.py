"""Builds the source of a run's batches from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from post_training.plan.partial_rollout import PartialRollout
from verl_patches.features.data_order.loader import NextPrompts, ResumableLoader
from verl_patches.features.data_order.order import DataOrder, PlacedSampler
from verl_patches.features.dynamic_sampling.feature import DYNAMIC_SAMPLING, FilterGroups
from verl_patches.features.dynamic_sampling.queue import PromptQueue
from verl_patches.features.dynamic_sampling.source import RolloutBuffer, Sizes
from verl_patches.features.partial_rollout.feature import PARTIAL_ROLLOUT
from verl_patches.features.partial_rollout.source import PartialRolloutBuffer
from verl_patches.features.step import Source, Trainer


def order_of(trainer: Trainer, batch: int | None = None) -> DataOrder:
    """Return the order in which a trainer goes through its data, in batches of `batch` rows or else of its loader's."""
    data = trainer.config.data
    batch = batch or data.get("gen_batch_size", data.train_batch_size)
    return DataOrder(len(trainer.train_dataset), batch, data.get("seed", 1) if data.shuffle else None)


def source_of(trainer: Trainer, sampler: PlacedSampler, collate: Callable[[Sequence[Any]], Any]) -> tuple[Source, Any]:
    """Return the source of a trainer that has verl's loader, and the object whose position a checkpoint keeps."""
    config, rows, steps = trainer.config, trainer.train_dataset, trainer.total_training_steps
    size, answers = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    epochs = config.trainer.total_epochs
    order = order_of(trainer, size)
    if DYNAMIC_SAMPLING.is_active():
        sizes = Sizes(size, config.data.get("gen_batch_size") or 3 * size, answers, steps)
        filtered = RolloutBuffer(rows, collate, PromptQueue(order, epochs), FilterGroups.of(config), sizes)
        return filtered, filtered
    if PARTIAL_ROLLOUT.is_active():
        chosen, queue = PARTIAL_ROLLOUT.current(), PromptQueue(order, epochs, used=order.batches * size)
        policy = PartialRollout(size, chosen.threshold, chosen.max_steps)
        finished = PartialRolloutBuffer(rows, collate, queue, policy, answers, steps)
        return finished, finished
    loader = ResumableLoader(trainer.train_dataloader, sampler, order_of(trainer), steps)
    return NextPrompts(loader, epochs), loader
