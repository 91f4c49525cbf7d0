"""The source of batches with partial rollouts.

Only the rollout decides on which of the prompts in flight a step trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from post_training.plan.partial_rollout import AnswerGroup, GroupsInFlight, PartialRollout, ages, spread
from post_training.report.run_error import RunError
from verl_patches.features.data_order.order import DataOrderError
from verl_patches.features.dynamic_sampling.queue import Prompt, PromptQueue
from verl_patches.features.partial_rollout.answers import Answer
from verl_patches.features.partial_rollout.columns import FINISHED, TOKENS, with_rows
from verl_patches.features.partial_rollout.engine import Begun, Row, Share
from verl_patches.features.step import Collected, Step, Workers, split

Answers = tuple[Answer, ...]
_LOG_PROBS = "rollout_log_probs"


class PartialRolloutBuffer:
    """Fills every step's batch with finished groups, and keeps the others in flight.

    Args:
        rows: `rows[i]` is a prompt.
        collate: makes a batch of prompts.
        queue: the order of prompts.
        policy: how many groups are in flight, and how long.
        answers: answers to each prompt.
        steps: steps of the run; after the batch of the last one there is none.
    """

    ended_by = None

    def __init__(
        self,
        rows: Any,
        collate: Callable[[Sequence[Any]], Any],
        queue: PromptQueue,
        policy: PartialRollout,
        answers: int,
        steps: int,
    ) -> None:
        self._rows, self._collate, self._queue, self._answers, self._steps = rows, collate, queue, answers, steps
        self._groups: GroupsInFlight[Answers] = GroupsInFlight(policy)
        self._given = 0
        self.metrics: dict[str, float] = {}
        """Metrics of the step's answers."""

    def collect(self, step: Step, workers: Workers) -> Collected | None:
        """Collect the batch of a step; None after the last step, and when the prompts of all epochs have run out."""
        if self._given >= self._steps:
            return None
        epoch, policy = self._queue.epoch, replace(self._groups.policy, multiple=workers.multiple)
        self._groups.policy = policy
        fresh = self._queue.take(policy.fresh(len(self._groups), self._steps - self._given))
        self._groups.begin(step.number, fresh, (Answer(),) * self._answers)
        if len(self._groups) < policy.batch:
            return None
        self._given += 1
        taken, answers = self._generated(step, workers)
        self.metrics = metrics_of(step.number, taken, len(self._groups))
        prompts, asked = split(self._collate([self._rows[group.prompt[1]] for group in taken]))
        return Collected(epoch, prompts, asked, answers)

    def _generated(self, step: Step, workers: Workers) -> tuple[list[AnswerGroup[Answers]], Any]:
        """Generate; remove and return the groups that the step trains on, with their answers from the workers."""
        from verl import DataProto

        groups, policy, n = self._groups.groups, self._groups.policy, self._answers
        padding = -len(groups) % policy.multiple
        old = [place for place, group in enumerate(groups) if group.begun < step.number]
        new = [place for place, group in enumerate(groups) if group.begun == step.number]
        order = spread(old, [*new, *[-1] * padding], policy.multiple)
        due = self._groups.overdue(step.number)
        nothing = Row([Begun(finished=True)] * n)
        rows = [_row(groups[place].content, due[place]) if place >= 0 else nothing for place in order]
        items = [self._rows[groups[max(place, 0)].prompt[1]] for place in order]
        _, asked = split(self._collate(items))
        with step.timed("gen"):
            found = workers.generate(with_rows(asked, rows, Share(policy.batch + padding, len(rows))))
        at = {place: number * n for number, place in enumerate(order)}
        self._groups.update([self._grown(group, step.number, found, at[place]) for place, group in enumerate(groups)])
        where = {group.prompt: at[place] for place, group in enumerate(groups)}
        taken = self._groups.take([all(each.finished for each in group.content) for group in self._groups.groups])
        answers = DataProto.concat([found[where[group.prompt] : where[group.prompt] + n] for group in taken])
        answers.pop(batch_keys=[TOKENS, FINISHED])
        return taken, answers

    def _grown(self, group: AnswerGroup[Answers], step: int, found: Any, first: int) -> Answers:
        if _LOG_PROBS not in found.batch.keys():
            raise RunError(
                "the rollout returned no log-probs of its tokens, which a partial rollout needs. Set "
                "actor_rollout_ref.rollout.name to vllm"
            )
        grown = []
        for row, answer in enumerate(group.content, start=first):
            count = int(found.batch[TOKENS][row])
            tokens, log_probs = (found.batch[name][row, :count].tolist() for name in ("responses", _LOG_PROBS))
            grown.append(answer.grown(step, tokens, log_probs, bool(found.batch[FINISHED][row])))
        return tuple(grown)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the source and the answers in flight as JSON values."""
        in_flight = [
            {"prompt": list(group.prompt), "begun": group.begun, "answers": [each.state() for each in group.content]}
            for group in self._groups.groups
        ]
        return {"given": self._given, "queue": self._queue.state_dict(), "in_flight": in_flight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position and the answers in `state`.

        Raises:
            DataOrderError: it belongs to other data or settings, or to a run without partial rollouts.
        """
        try:
            in_flight = [
                AnswerGroup(
                    Prompt(*group["prompt"]), int(group["begun"]), tuple(Answer.of(each) for each in group["answers"])
                )
                for group in state["in_flight"]
            ]
            given, queue = int(state["given"]), state["queue"]
        except (KeyError, TypeError, ValueError) as error:
            raise DataOrderError(
                f"the checkpoint has no answers in flight ({error!r}), so it was written without partial rollouts. "
                "Resume with actor_rollout_ref.overlay.partial_rollout.enabled=false, or from another checkpoint"
            ) from error
        if any(len(group.content) != self._answers for group in in_flight):
            raise DataOrderError(
                f"the checkpoint's prompts in flight have {len(in_flight[0].content)} answers each, but this run has "
                f"actor_rollout_ref.rollout.n={self._answers}. Set it to the same number"
            )
        self._queue.load_state_dict(queue)
        self._groups = GroupsInFlight(self._groups.policy, in_flight)
        self._given = given

    def __len__(self) -> int:
        return self._steps


def _row(answers: Answers, due: bool) -> Row:
    return Row([Begun(each.tokens.tolist(), each.log_probs.tolist(), each.finished) for each in answers], due)


def metrics_of(step: int, taken: Sequence[AnswerGroup[Answers]], waiting: int) -> dict[str, float]:
    """Return the metrics of the groups that `step` trains on; `waiting`: prompts that stay in flight."""
    tokens: dict[int, int] = {}
    for group in taken:
        for answer in group.content:
            for age, number in ages(step, answer.segments).items():
                tokens[age] = tokens.get(age, 0) + number
    old = sum(number for age, number in tokens.items() if age)
    return {
        "partial_rollout/old_share": old / max(1, sum(tokens.values())),
        "partial_rollout/mean_age": sum(age * number for age, number in tokens.items()) / max(1, old),
        "partial_rollout/max_age": max((age for age, number in tokens.items() if number), default=0),
        "partial_rollout/waiting_prompts": waiting,
    }
