"""Which prompts are generated for when a rollout may end before all of its answers are finished.

A step trains on `batch` groups, a group being the answers to one prompt. More prompts than that are in flight, the
rollout ends when enough groups are finished, and the others keep their tokens and go on in the next step. A group that
has gone on `max_steps` times is not left behind again, so no token is older than that when it is trained on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Generic, TypeVar

Content = TypeVar("Content")

LEAST_THRESHOLD = 0.5
"""Below it more groups than one batch would wait, and what falls due in a step might not fit into it."""


@dataclass(frozen=True)
class PartialRollout:
    """batch: groups of a step. threshold: the share of the prompts in flight whose groups are finished when a rollout
    ends, from 0.5 to 1. max_steps: further steps in which a group may go on. multiple: what the number of prompts in
    flight divides by."""

    batch: int
    threshold: float
    max_steps: int
    multiple: int = 1

    @property
    def in_flight(self) -> int:
        """Prompts in flight as a rollout begins: with 32 of a step and a threshold of 0.8, 40."""
        wanted = ceil(self.batch / Fraction(str(self.threshold)))
        return -(-wanted // self.multiple) * self.multiple

    def fresh(self, carried: int, steps_left: int) -> int:
        """New prompts of a step, beside `carried` groups; `steps_left` with this one. What would be left over at the
        end of the run is not begun."""
        return max(0, min(self.in_flight, self.batch * steps_left) - carried)


@dataclass(frozen=True)
class Group(Generic[Content]):
    """The answers to a prompt: `prompt` is its epoch and row, `begun` the step in which it was generated for first."""

    prompt: tuple[int, int]
    begun: int
    content: Content


class GroupsInFlight(Generic[Content]):
    """Groups that have been begun and not trained on, in the order in which they were begun."""

    def __init__(self, policy: PartialRollout, groups: Iterable[Group[Content]] = ()) -> None:
        self.policy = policy
        self._groups = list(groups)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> Sequence[Group[Content]]:
        """All of them, the oldest first."""
        return tuple(self._groups)

    def begin(self, step: int, prompts: Iterable[tuple[int, int]], content: Content) -> None:
        """Generate for further prompts from `step` on; `content` is what a group begins with."""
        self._groups += [Group(prompt, step, content) for prompt in prompts]

    def overdue(self, step: int) -> list[bool]:
        """Which groups have to be finished in `step`, in their order."""
        return [step - group.begun >= self.policy.max_steps for group in self._groups]

    def update(self, contents: Sequence[Content]) -> None:
        """What the groups hold after a rollout, in their order."""
        self._groups = [replace(group, content=new) for group, new in zip(self._groups, contents, strict=True)]

    def take(self, finished: Sequence[bool]) -> list[Group[Content]]:
        """The groups of a step, which leave: the oldest that are finished. `finished`: in the order of `groups`.

        Raises:
            ValueError: fewer are finished than a step trains on.
        """
        places = [place for place, is_finished in enumerate(finished) if is_finished][: self.policy.batch]
        if len(places) < self.policy.batch:
            raise ValueError(f"{len(places)} groups are finished, and a step trains on {self.policy.batch}")
        taken = [self._groups[place] for place in places]
        self._groups = [group for place, group in enumerate(self._groups) if place not in set(places)]
        return taken


def may_end(finished: Iterable[int], needed: int, held: bool) -> bool:
    """Whether a rollout ends. finished: finished groups by rank; held: a group that must be finished is not."""
    return not held and sum(finished) >= needed


def spread(carried: Sequence[int], fresh: Sequence[int], parts: int) -> list[int]:
    """An order in which every one of `parts` equal, consecutive parts has as many of `carried`, give or take one; what
    was generated before runs short, and one rank would have it all.

    With 0 1 2 carried, 3 4 5 fresh and 3 parts: 0 3 | 1 4 | 2 5. Without any carried it is the order of `fresh`.

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
    """Tokens by their age in steps, of one answer that is trained on in `step`. segments: (step, tokens sampled in it).

    >>> ages(5, [(3, 10), (5, 4)])
    {2: 10, 0: 4}
    """
    found: dict[int, int] = {}
    for sampled, tokens in segments:
        found[step - sampled] = found.get(step - sampled, 0) + tokens
    return found
