"""The batches of verl's training loop, each generated for, rewarded and filtered before the loop sees it.

verl's loop takes a batch of prompts from its loader, asks the workers to generate for it, and scores the answers. Here
the loader does all three, in as many waves as it takes to fill the batch with prompts that qualify, and the loop's own
two calls are answered with what has been generated and scored already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch

from post_training.report.run_error import RunError
from verl_patches.features.dynamic_sampling.acceptance import Acceptance
from verl_patches.features.dynamic_sampling.feature import KEY, SEQUENCE_REWARD, FilterGroups
from verl_patches.features.dynamic_sampling.groups import qualifies
from verl_patches.features.dynamic_sampling.queue import Prompt, PromptQueue
from verl_patches.features.dynamic_sampling.wave import Group, Workers, generate_groups

PLACE = "place_in_step"
"""The column with an answer's place in the batch, by which its reward is found wherever verl moves it."""


class PromptsExhausted(RunError):
    """A step cannot be filled with prompts that qualify; the message is one sentence."""


@dataclass(frozen=True)
class Sizes:
    """Prompts of a step and of the largest wave, answers to each, and the steps of the run."""

    batch: int
    largest_wave: int
    answers: int
    steps: int


class PromptSource:
    """In the place of verl's loader: `rows[i]` are prompts, made into a batch by `collate`.

    Prompts that qualify beyond the batch go back to the head of the queue and are generated for again, with the weights
    that are new by then. As `ResumableLoader` does, an epoch that was finished before a resume gives no batches, and no
    batch comes after the last step's.
    """

    def __init__(
        self, rows: Any, collate: Callable[[Sequence[Any]], Any], queue: PromptQueue, chosen: FilterGroups, sizes: Sizes
    ) -> None:
        self._rows, self._collate, self._queue, self._chosen, self._sizes = rows, collate, queue, chosen, sizes
        self._acceptance = Acceptance()
        self._epochs_asked_for = self._given = 0
        self._workers: Workers | None = None
        self._pending: list[Group] | None = None
        self._rewards: tuple[torch.Tensor, dict[str, list[Any]]] | None = None
        self.seconds: dict[str, float] = {}
        """Of the step's generation and rewards, by the names of verl's timers."""
        self.figures: dict[str, float] = {}
        """Of the step's waves, as metrics."""
        self.ended_by: str | None = None
        """Why the prompts did not last for all steps, if they did not and the run is to stop then."""

    def connect(self, workers: Workers) -> None:
        """Generate with `workers`; before this no batch can be had."""
        self._workers = workers

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epochs_asked_for
        self._epochs_asked_for += 1
        while self.ended_by is None and self._given < self._sizes.steps and self._queue.epoch <= epoch:
            before = self.state_dict()
            try:
                groups = self._fill()
            except PromptsExhausted as exhausted:
                if self._chosen.on_exhausted == "fail":
                    raise
                self._restore(before)
                self.ended_by = str(exhausted)
                return
            self._given += 1
            self._pending = groups
            yield self._collate([group.item for group in groups])

    def _fill(self) -> list[Group]:
        """Groups that qualify, as many as a step has prompts."""
        self.seconds = dict.fromkeys(("gen", "reward"), 0.0)
        self._acceptance.begin_step()
        kept: list[Group] = []
        scores: list[float] = []
        waves = generated = 0
        while len(kept) < self._sizes.batch:
            missing = self._sizes.batch - len(kept)
            if 0 < self._chosen.max_num_gen_batches <= waves:
                raise PromptsExhausted(
                    self._sentence(generated, len(kept), f"{waves} waves, {KEY}.max_num_gen_batches")
                )
            assert self._workers is not None
            prompts = self._queue.take(self._acceptance.wave(missing, self._workers.multiple, self._sizes.largest_wave))
            if not prompts:
                raise PromptsExhausted(self._sentence(generated, len(kept), "all epochs, trainer.total_epochs"))
            groups = self._generated(prompts)
            qualified = [group for group in groups if self._qualifies(group)]
            self._acceptance.count(len(groups), len(qualified))
            kept += qualified
            scores += [float(group.rewards.sum()) / self._sizes.answers for group in groups]
            waves, generated = waves + 1, generated + len(groups)
        self._queue.give_back([group.prompt for group in kept[self._sizes.batch :]])
        self.figures = {
            "sampling/generated_prompts": generated,
            "sampling/waves": waves,
            "sampling/qualified_share": len(kept) / generated,
            "sampling/generated_score": sum(scores) / generated,
        }
        return kept[: self._sizes.batch]

    def _sentence(self, generated: int, qualified: int, limit: str) -> str:
        return (
            f"of {generated} prompts that were generated for, {qualified} qualified by {KEY}.metric="
            f"{self._chosen.metric}, and the {self._sizes.batch} of a step were not reached within {limit}; give "
            f"easier, harder or more prompts, raise the limit, or set {KEY}.on_exhausted=stop_and_save"
        )

    def _generated(self, prompts: Sequence[Prompt]) -> list[Group]:
        assert self._workers is not None
        items = [self._rows[prompt.row] for prompt in prompts]
        return generate_groups(prompts, items, self._collate, self._sizes.answers, self._workers, self.seconds)

    def _qualifies(self, group: Group) -> bool:
        return qualifies(self._values(group), self._chosen.lower_bound, self._chosen.upper_bound)

    def _values(self, group: Group) -> list[float]:
        """The metric of each answer."""
        name = self._chosen.metric
        if name == SEQUENCE_REWARD:
            return group.rewards.sum(-1).tolist()
        if name not in group.further:
            found = ", ".join([*group.further, SEQUENCE_REWARD])
            raise RunError(
                f"the reward function's output has no {name}, which {KEY}.metric names; it has {found}: name one of "
                "them, or let the reward function return it"
            )
        try:
            return [float(value) for value in group.further[name]]
        except (TypeError, ValueError) as error:
            raise RunError(
                f"the reward function's {name}, which {KEY}.metric names, is no number ({error}); name another value"
            ) from error

    def answering(self, prompts: Any) -> Any:
        """In the place of verl's call for the answers to a batch: those that are there. Other calls are passed on.

        prompts: a `DataProto`; verl marks one for validation, and one without sampling, in its meta information.
        """
        from verl import DataProto

        assert self._workers is not None
        if prompts.meta_info.get("validate") or not prompts.meta_info.get("do_sample", True):
            return self._workers.generate(prompts)
        groups, self._pending = self._pending or [], None
        due = self._collate([group.item for group in groups])["input_ids"] if groups else None
        if due is None or not torch.equal(due, prompts.batch["input_ids"]):
            raise RuntimeError("verl's loop asks for answers to other prompts than those of the step")
        answers = DataProto.concat([group.answers for group in groups])
        answers.non_tensor_batch[PLACE] = numpy.arange(len(answers)).astype(object)
        names = set.intersection(*(set(group.further) for group in groups))
        further = {
            name: [value for group in groups for value in group.further[name]]
            for name in groups[0].further
            if name in names
        }
        self._rewards = torch.cat([group.rewards for group in groups]), further
        return answers

    def stored_reward(self, reward_fn: Callable[..., Any]) -> Callable[..., Any]:
        """verl's `reward_fn`, which finds the rewards of the step's answers and computes those of others."""

        def reward(data: Any, return_dict: bool = False) -> Any:
            places = data.non_tensor_batch.get(PLACE)
            if places is None or self._rewards is None:
                return reward_fn(data, return_dict=return_dict)
            rows = [int(place) for place in places]
            rewards, further = self._rewards
            if not return_dict:
                return rewards[rows]
            ordered = {name: [values[row] for row in rows] for name, values in further.items()}
            return {"reward_tensor": rewards[rows], "reward_extra_info": ordered}

        return reward

    def state_dict(self) -> dict[str, Any]:
        """Where the source is, as JSON holds it."""
        return {"given": self._given, "queue": self._queue.state_dict(), "acceptance": self._acceptance.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` says.

        Raises:
            DataOrderError: it is of other data, or of a run without this source.
        """
        self._queue.load_state_dict(state.get("queue", {}))
        self._restore(state)
        self._epochs_asked_for = 0

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._queue.load_state_dict(state["queue"])
        self._acceptance = Acceptance.of(state["acceptance"])
        self._given = int(state["given"])

    def __len__(self) -> int:
        return self._sizes.steps


class StepSource(Protocol):
    """A loader that generates before verl's step begins. seconds: of the step, by the names of verl's timers; figures:
    of the step, as metrics."""

    seconds: dict[str, float]
    figures: dict[str, float]


_source: StepSource | None = None


def put_in_force(source: StepSource | None) -> None:
    """The source of the training in this process."""
    global _source
    _source = source


def current_source() -> StepSource | None:
    """The source of the training in this process; None where verl's loader is in use."""
    return _source
