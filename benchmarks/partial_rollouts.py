"""Partial rollouts for `decode_schedule.py`: the steps of a training in sequence, with and without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from post_training.plan.partial_rollout import AnswerGroup, GroupsInFlight, PartialRollout

Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Answers:
    """The state of one group's answers.

    Attributes:
        left: tokens to come, by answer.
        segments: (step, tokens sampled in it), for all answers together.
        carried: tokens that its continuations put through the engine again.
    """

    left: Lengths
    segments: tuple[tuple[int, int], ...] = ()
    carried: int = 0


@dataclass(frozen=True)
class PartialCost:
    """One row.

    Attributes:
        decode_steps: decode steps of all training steps, with partial rollouts.
        without: the same without partial rollouts.
        saved: share of `without` that partial rollouts save.
        old_share: share of tokens that were sampled in an earlier step than the one that trained on them.
        mean_age: mean age of those tokens, in steps.
        max_age: largest age of those tokens, in steps.
        again: tokens, without prompts, that went through the engine once more, as a share of all tokens.
    """

    lengths: str
    ranks: int
    training_steps: int
    threshold: float
    max_steps: int
    decode_steps: int
    without: int
    saved: float
    old_share: float
    mean_age: float
    max_age: int
    again: float
    lost: int


def decode_steps(left: Lengths, due: Sequence[bool], batch: int, window: int) -> int:
    """Return the decode steps of a rollout, which ends with the window that finishes `batch` groups and all due ones.

    Example: if 2 of the groups that need 3, 9 and 5 steps have to finish, it is 5; it is 9 if the second is due, and 8
    in windows of 4.

    Args:
        left: [groups, answers], tokens to come.
        due: whether a group has to finish.
        batch: number of groups to finish.
        window: decode steps of a window.
    """
    finish = left.max(1)
    needed = max([int(np.sort(finish)[batch - 1]), *(int(each) for each in finish[list(due)])])
    return min(-(-needed // window) * window, int(finish.max()))


def partial_cost(
    name: str, ranks: int, lengths: Lengths, policy: PartialRollout, steps: int, window: int
) -> PartialCost:
    """Simulate a training of `steps` steps; `lengths` [policy.batch x steps, answers] has the groups in their order."""
    groups: GroupsInFlight[Answers] = GroupsInFlight(policy)
    spent = without = handed_out = again = 0
    trained: list[tuple[int, AnswerGroup[Answers]]] = []
    for step in range(1, steps + 1):
        again += sum(group.content.carried for group in groups.groups)
        number = policy.fresh(len(groups), steps - step + 1)
        for row in range(handed_out, handed_out + number):
            groups.begin(step, [(0, row)], Answers(lengths[row]))
        handed_out += number
        left = np.stack([group.content.left for group in groups.groups])
        made = decode_steps(left, groups.overdue(step), policy.batch, window)
        after = np.maximum(0, left - made)
        groups.update([_advanced(group.content, rest, step, lengths[group.prompt[1]])
                       for group, rest in zip(groups.groups, after, strict=True)])  # fmt: skip
        trained += [(step, group) for group in groups.take((after.max(1) == 0).tolist())]
        spent += made
        without += int(lengths[policy.batch * (step - 1) : policy.batch * step].max())
    old = {age: 0 for age in range(1, policy.max_steps + 1)}
    for step, group in trained:
        for sampled, tokens in group.content.segments:
            if sampled < step:
                old[step - sampled] = old.get(step - sampled, 0) + tokens
    total, aged = int(lengths.sum()), sum(old.values())
    return PartialCost(
        lengths=name, ranks=ranks, training_steps=steps, threshold=policy.threshold, max_steps=policy.max_steps,
        decode_steps=spent, without=without, saved=round(1 - spent / without, 3), old_share=round(aged / total, 3),
        mean_age=round(sum(age * tokens for age, tokens in old.items()) / aged, 3) if aged else 0.0,
        max_age=max((age for age, tokens in old.items() if tokens), default=0), again=round(again / total, 3),
        lost=total - sum(tokens for _, group in trained for _, tokens in group.content.segments),
    )  # fmt: skip


def _advanced(before: Answers, rest: Lengths, step: int, lengths: Lengths) -> Answers:
    sampled = int((before.left - rest).sum())
    segments = (*before.segments, (step, sampled)) if sampled else before.segments
    return replace(before, left=rest, segments=segments, carried=int((lengths - rest)[rest > 0].sum()))
