"""Collects the batch of a step from prompts that qualify, over as many generation batches as needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from post_training.report.run_error import RunError
from verl_patches.features.dynamic_sampling.acceptance import Acceptance
from verl_patches.features.dynamic_sampling.feature import KEY, SEQUENCE_REWARD, FilterGroups
from verl_patches.features.dynamic_sampling.generation_batch import PromptGroup, generate_groups
from verl_patches.features.dynamic_sampling.groups import qualifies
from verl_patches.features.dynamic_sampling.queue import Prompt, PromptQueue
from verl_patches.features.step import Collected, Step, Workers, split


class PromptsExhausted(RunError):
    """A step cannot be filled with prompts that qualify; the message is one sentence."""


@dataclass(frozen=True)
class Sizes:
    """Prompts of a step and of the largest generation batch, answers to each, and the steps of the run."""

    batch: int
    largest_gen_batch: int
    answers: int
    steps: int


class RolloutBuffer:
    """Fills the batch of every step with prompts that qualify; `rows[i]` are prompts, made into a batch by `collate`.

    Prompts that qualify beyond the batch go back to the head of the queue and are generated for again, with the newer
    weights of the next step. After the batch of the last step there is none.
    """

    def __init__(
        self, rows: Any, collate: Callable[[Sequence[Any]], Any], queue: PromptQueue, chosen: FilterGroups, sizes: Sizes
    ) -> None:
        self._rows, self._collate, self._queue, self._chosen, self._sizes = rows, collate, queue, chosen, sizes
        self._acceptance = Acceptance()
        self._given = 0
        self.metrics: dict[str, float] = {}
        """Metrics of the step's generation batches."""
        self.ended_by: str | None = None
        """The reason why prompts ran out before the last step, if they did and on_exhausted is stop_and_save."""

    def collect(self, step: Step, workers: Workers) -> Collected | None:
        """Collect the batch of a step; None after the last step, and if the prompts have run out.

        Raises:
            PromptsExhausted: the prompts have run out, and on_exhausted is fail.
        """
        if self.ended_by is not None or self._given >= self._sizes.steps:
            return None
        epoch, before = self._queue.epoch, self.state_dict()
        try:
            groups = self._fill(step, workers)
        except PromptsExhausted as exhausted:
            if self._chosen.on_exhausted == "fail":
                raise
            self._restore(before)
            self.ended_by = str(exhausted)
            return None
        self._given += 1
        return self._batch_of(epoch, groups)

    def _batch_of(self, epoch: int, groups: Sequence[PromptGroup]) -> Collected:
        from verl import DataProto

        prompts, asked = split(self._collate([group.item for group in groups]))
        names = set.intersection(*(set(group.further) for group in groups))
        further = {
            name: [value for group in groups for value in group.further[name]]
            for name in groups[0].further
            if name in names
        }
        rewards = torch.cat([group.rewards for group in groups]), further
        return Collected(epoch, prompts, asked, DataProto.concat([group.answers for group in groups]), rewards)

    def _fill(self, step: Step, workers: Workers) -> list[PromptGroup]:
        """Generate until as many groups qualify as a step has prompts, and return those."""
        self._acceptance.begin_step()
        kept: list[PromptGroup] = []
        scores: list[float] = []
        gen_batches = generated = 0
        while len(kept) < self._sizes.batch:
            missing = self._sizes.batch - len(kept)
            if 0 < self._chosen.max_num_gen_batches <= gen_batches:
                raise PromptsExhausted(
                    self._sentence(generated, len(kept), f"{gen_batches} generation batches, {KEY}.max_num_gen_batches")
                )
            prompts = self._queue.take(
                self._acceptance.gen_batch_size(missing, workers.multiple, self._sizes.largest_gen_batch)
            )
            if not prompts:
                raise PromptsExhausted(self._sentence(generated, len(kept), "all epochs, trainer.total_epochs"))
            groups = self._generated(prompts, step, workers)
            qualified = [group for group in groups if self._qualifies(group)]
            self._acceptance.count(len(groups), len(qualified))
            kept += qualified
            scores += [float(group.rewards.sum()) / self._sizes.answers for group in groups]
            gen_batches, generated = gen_batches + 1, generated + len(groups)
        self._queue.give_back([group.prompt for group in kept[self._sizes.batch :]])
        self.metrics = {
            "sampling/generated_prompts": generated,
            "sampling/gen_batches": gen_batches,
            "sampling/qualified_share": len(kept) / generated,
            "sampling/generated_score": sum(scores) / generated,
        }
        return kept[: self._sizes.batch]

    def _sentence(self, generated: int, qualified: int, limit: str) -> str:
        return (
            f"of {generated} generated prompts, {qualified} qualified by {KEY}.metric={self._chosen.metric}, fewer "
            f"than the {self._sizes.batch} of a step, within {limit}. Use easier, harder or more prompts, raise the "
            f"limit, or set {KEY}.on_exhausted=stop_and_save"
        )

    def _generated(self, prompts: Sequence[Prompt], step: Step, workers: Workers) -> list[PromptGroup]:
        items = [self._rows[prompt.row] for prompt in prompts]
        return generate_groups(prompts, items, self._collate, self._sizes.answers, workers, step)

    def _qualifies(self, group: PromptGroup) -> bool:
        return qualifies(self._values(group), self._chosen.lower_bound, self._chosen.upper_bound)

    def _values(self, group: PromptGroup) -> list[float]:
        """Return the metric of each answer.

        Raises:
            RunError: the reward function does not return the metric, or returns no number.
        """
        name = self._chosen.metric
        if name == SEQUENCE_REWARD:
            return group.rewards.sum(-1).tolist()
        if name not in group.further:
            found = ", ".join([*group.further, SEQUENCE_REWARD])
            raise RunError(
                f"{KEY}.metric={name} is invalid: the reward function returns {found}. Set it to one of them, or let "
                "the reward function return it"
            )
        try:
            return [float(value) for value in group.further[name]]
        except (TypeError, ValueError) as error:
            raise RunError(
                f"the reward function's {name}, set in {KEY}.metric, is not a number ({error}). Set another output"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the source as JSON values."""
        return {"given": self._given, "queue": self._queue.state_dict(), "acceptance": self._acceptance.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position in `state`.

        Raises:
            DataOrderError: it belongs to other data, or to a run without this source.
        """
        self._queue.load_state_dict(state.get("queue", {}))
        self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._queue.load_state_dict(state["queue"])
        self._acceptance = Acceptance.of(state["acceptance"])
        self._given = int(state["given"])

    def __len__(self) -> int:
        return self._sizes.steps
