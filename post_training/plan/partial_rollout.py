"""Keeps track of prompts in flight when a rollout may end before all of its answers are finished.

A step trains on `batch` groups; a group is all answers to one prompt. More prompts than that are in flight. The rollout
ends when enough groups are finished, and the others keep their tokens and continue in the next step. A rollout does not
end before a group that has continued `max_steps` times is finished, so no token is older than that when it is trained
on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Generic, TypeVar

Content = TypeVar("Content")

LEAST_THRESHOLD = 0.5
"""With a lower threshold more than one batch of groups would wait, and those overdue in a step might not fit into it.
"""


@dataclass(frozen=True)
class PartialRollout:
    """The options of partial rollouts.

    Attributes:
        batch: number of groups that a step trains on.
        threshold: share of the prompts in flight whose groups are finished when a rollout ends, from 0.5 to 1.
        max_steps: number of further steps in which a group may continue.
        multiple: the number of prompts in flight is a multiple of it.
    """

    batch: int
    threshold: float
    max_steps: int
    multiple: int = 1

    @property
    def in_flight(self) -> int:
        """Number of prompts in flight when a rollout begins: 40 with a batch of 32 and a threshold of 0.8."""
        wanted = ceil(self.batch / Fraction(str(self.threshold)))
        return -(-wanted // self.multiple) * self.multiple

    def fresh(self, carried: int, steps_left: int) -> int:
        """Return the number of new prompts of a step beside `carried` groups.

        Prompts that would be left over at the end of the run are not begun; `steps_left` includes this step.
        """
        return max(0, min(self.in_flight, self.batch * steps_left) - carried)


@dataclass(frozen=True)
class AnswerGroup(Generic[Content]):
    """The answers to a prompt: `prompt` is its epoch and row, `begun` the step in which its generation began."""

    prompt: tuple[int, int]
    begun: int
    content: Content


class GroupsInFlight(Generic[Content]):
    """Groups that were begun but not yet trained on, in the order in which they were begun."""

    def __init__(self, policy: PartialRollout, groups: Iterable[AnswerGroup[Content]] = ()) -> None:
        self.policy = policy
        self._groups = list(groups)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> Sequence[AnswerGroup[Content]]:
        """All groups, oldest first."""
        return tuple(self._groups)

    def begin(self, step: int, prompts: Iterable[tuple[int, int]], content: Content) -> None:
        """Add groups for new prompts that begin in `step`, with `content` as their initial content."""
        self._groups += [AnswerGroup(prompt, step, content) for prompt in prompts]

    def overdue(self, step: int) -> list[bool]:
        """Return for each group whether it has to be finished in `step`."""
        return [step - group.begun >= self.policy.max_steps for group in self._groups]

    def update(self, contents: Sequence[Content]) -> None:
        """Set the contents of the groups after a rollout, in their order."""
        self._groups = [replace(group, content=new) for group, new in zip(self._groups, contents, strict=True)]

    def take(self, finished: Sequence[bool]) -> list[AnswerGroup[Content]]:
        """Remove and return the groups that a step trains on: the oldest finished ones.

        Args:
            finished: whether a group is finished, in the order of `groups`.

        Raises:
            ValueError: fewer groups are finished than a step trains on.
        """
        places = [place for place, is_finished in enumerate(finished) if is_finished][: self.policy.batch]
        if len(places) < self.policy.batch:
            raise ValueError(f"{len(places)} groups are finished, but a step trains on {self.policy.batch}")
        taken = [self._groups[place] for place in places]
        self._groups = [group for place, group in enumerate(self._groups) if place not in set(places)]
        return taken


def may_end(finished: Iterable[int], needed: int, held: bool) -> bool:
    """Return whether a rollout may end.

    Args:
        finished: number of finished groups, by rank.
        needed: number of groups that the step trains on.
        held: whether a group that must be finished in this step is not.
    """
    return not held and sum(finished) >= needed


def spread(carried: Sequence[int], fresh: Sequence[int], parts: int) -> list[int]:
    """Return an order that spreads `carried` over equal, consecutive parts, equally up to one.

    Carried groups finish earlier, and one rank would otherwise have them all. With 0 1 2 carried, 3 4 5 fresh and 3
    parts: 0 3 | 1 4 | 2 5. Without carried groups it is the order of `fresh`.

    Raises:
        ValueError: the parts cannot be equal.
    """
    each, rest = divmod(len(carried) + len(fresh), parts)
    if rest:
        raise ValueError(f"{len(carried) + len(fresh)} rows do not divide among {parts} parts")
    order: list[int] = []
    new = iter(fresh)
    for part in range(parts):
        old = list(carried[part::parts])
        order += old + [row for _, row in zip(range(each - len(old)), new, strict=False)]
    return order


def ages(step: int, segments: Collection[tuple[int, int]]) -> dict[int, int]:
    """Return the tokens of an answer that is trained on in `step`, by their age in steps.

    Args:
        step: in which the answer is trained on.
        segments: pairs of a step and the number of tokens sampled in it.

    >>> ages(5, [(3, 10), (5, 4)])
    {2: 10, 0: 4}
    """
    found: dict[int, int] = {}
    for sampled, tokens in segments:
        found[step - sampled] = found.get(step - sampled, 0) + tokens
    return found
