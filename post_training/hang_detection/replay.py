"""From the calls of a hung run: who waits for whom, which rank is to blame, and the schedule made again.

Ranks meet in equal numbers of a group. A rank that waits in call 7 of a group waits for the members that have not
entered call 7. Nothing more is needed to tell four causes apart:

    skipped     two ranks have different collectives under one number
    no answer   a member has written nothing, or has stopped writing
    computes    a member waits in no collective
    order       all members wait, each for another, in different groups
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from post_training.hang_detection.calls import Call, Group, RankCalls

SKIPPED, NO_ANSWER, COMPUTES, ORDER, DEVICE = "skipped", "no answer", "computes", "order", "device"
# Calls that may be skipped or added at once and are recognised as that.
_MOST_SHIFT = 8
# A rank that hangs writes its file every few seconds.
_OUTDATED_S = 60

Place = tuple[str, int]
"""A call: name of the group, and number."""


@dataclass(frozen=True)
class Blame:
    """The cause of a hang. ranks: to blame; empty where it is none of theirs. sentence: what a person has to know."""

    cause: str
    ranks: tuple[int, ...]
    sentence: str


@dataclass(frozen=True)
class Schedule:
    """The collectives that the ranks of a hung run called.

    Args:
        written: by rank.
    """

    written: Mapping[int, RankCalls]

    @cached_property
    def groups(self) -> dict[str, Group]:
        """All groups, by name."""
        return {group.name: group for own in self.written.values() for group in own.groups}

    @cached_property
    def by_place(self) -> dict[Place, dict[int, Call]]:
        """For each call those of the ranks that have it."""
        found: dict[Place, dict[int, Call]] = {}
        for rank, own in self.written.items():
            for call in own.calls:
                found.setdefault((call.group, call.number), {})[rank] = call
        return found

    @cached_property
    def _oldest(self) -> dict[tuple[int, str], int]:
        """The lowest number of a group that a rank's buffer still has."""
        found: dict[tuple[int, str], int] = {}
        for rank, own in self.written.items():
            for call in own.calls:
                found.setdefault((rank, call.group), call.number)
        return found

    def was_entered(self, rank: int, place: Place) -> bool:
        """Whether a rank has entered a call, by what is written; one older than its buffer it has."""
        calls, oldest = self.by_place.get(place, {}), self._oldest.get((rank, place[0]))
        finished_elsewhere = rank not in self.written and any(call.finished_ns is not None for call in calls.values())
        return rank in calls or (oldest is not None and place[1] < oldest) or finished_elsewhere

    def missing(self, place: Place) -> tuple[int, ...]:
        """Members of a group that have not entered a call."""
        members = self.groups[place[0]].ranks if place[0] in self.groups else tuple(self.by_place[place])
        return tuple(rank for rank in members if not self.was_entered(rank, place))

    def written_at(self, rank: int) -> float:
        """When a rank wrote last, in unix seconds; 0 if it never did."""
        return self.written[rank].time if rank in self.written else 0.0

    @property
    def waiting(self) -> dict[int, Call]:
        """Of each rank that waits, the call that it waits in."""
        return {rank: call for rank, own in self.written.items() if (call := own.waits_for) is not None}

    def called(self, call: Call) -> str:
        """A call in words."""
        return f"{call.name} {call.number} of {self.groups.get(call.group, Group(call.group, '', ()))}"


def blame(schedule: Schedule) -> Blame | None:
    """The cause of a hang; None where no rank waits in a collective."""
    waiting = schedule.waiting
    if not waiting:
        return None
    found = _different(schedule)
    if found:
        return found
    missing = {rank for call in waiting.values() for rank in schedule.missing((call.group, call.number))}
    newest = max(own.time for own in schedule.written.values())
    absent = {rank for rank in missing if newest - schedule.written_at(rank) > _OUTDATED_S}
    if absent:
        sentence = f"{named(absent)} wrote no calls while others did: ended, stopped, or still making progress"
        return Blame(NO_ANSWER, tuple(sorted(absent)), sentence)
    computing = missing - waiting.keys()
    if computing:
        places = ", ".join(f"rank {rank} {schedule.written[rank].where}" for rank in sorted(computing))
        sentence = f"{named(computing)} did not come to a collective that others wait in: {places}"
        return Blame(COMPUTES, tuple(sorted(computing)), sentence)
    if not missing:
        return Blame(DEVICE, (), "every rank has entered the call that it waits in: look at devices and network")
    return _out_of_order(schedule, missing)


def _different(schedule: Schedule) -> Blame | None:
    """The first call of a group under which ranks have different collectives."""
    for place in sorted(
        schedule.by_place, key=lambda each: min(c.entered_ns for c in schedule.by_place[each].values())
    ):
        calls = schedule.by_place[place]
        kinds = Counter(call.kind for call in calls.values())
        if len(kinds) == 1:
            continue
        usual = kinds.most_common(1)[0][0]
        odd = tuple(sorted(rank for rank, call in calls.items() if call.kind != usual))
        theirs, others = calls[odd[0]], next(call for call in calls.values() if call.kind == usual)
        sentence = f"{named(odd)} called {_sized(theirs)} as number {place[1]} of {schedule.groups[place[0]]}, " + (
            f"and the others {_sized(others)}; {_shift(schedule, odd[0], others, place)}"
        )
        return Blame(SKIPPED, odd, sentence)
    return None


def _shift(schedule: Schedule, odd: int, usual: Call, place: Place) -> str:
    """Whether the odd rank is ahead of the others, by the calls that it skipped, or behind."""
    group, number = place
    member = next(rank for rank, call in schedule.by_place[place].items() if call.kind == usual.kind)

    def kinds(rank: int, first: int) -> list[tuple[object, ...]]:
        found = [schedule.by_place.get((group, first + step), {}).get(rank) for step in range(_MOST_SHIFT)]
        return [call.kind for call in found if call is not None]

    def alike(one: list[tuple[object, ...]], other: list[tuple[object, ...]]) -> int:
        """How many calls are the same; 0 where one of them differs."""
        pairs = list(zip(one, other, strict=False))
        return len(pairs) if all(own == their for own, their in pairs) else 0

    own, found = schedule.by_place[place][odd], list[tuple[int, int, str]]()
    for shift in range(1, _MOST_SHIFT):
        calls = "the call" if shift == 1 else f"{shift} calls"
        skipped = f"it left out {calls} from {usual.name} {number} on ({usual.where} on rank {member})"
        found.append((alike(kinds(odd, number), kinds(member, number + shift)), -shift, skipped))
        added = f"it made {calls} more, from {own.name} {number} on ({own.where})"
        found.append((alike(kinds(odd, number + shift), kinds(member, number)), -shift, added))
    longest, _, said = max(found)
    return said if longest else f"{own.where} on rank {odd}, {usual.where} on rank {member}"


def _out_of_order(schedule: Schedule, missing: Collection[int]) -> Blame:
    """Every rank waits for another: the one whose step from its last call to this one was never made before."""
    known: set[tuple[object, ...]] = set()
    steps: dict[int, tuple[object, ...]] = {}
    for rank, own in schedule.written.items():
        before: Call | None = None
        for call in own.calls:
            step = (before and (before.group, before.kind), call.group, call.kind)
            if call is own.waits_for:
                steps[rank] = step
                break
            known.add(step)
            before = call
    new = {rank for rank in steps if rank in missing and steps[rank] not in known}
    if not new or new >= set(missing):  # all do something new, or nobody: those are odd whom the most wait for
        counts = Counter(
            rank for call in schedule.waiting.values() for rank in schedule.missing((call.group, call.number))
        )
        most = max(counts.values())
        new = {rank for rank in missing if counts[rank] == most}
    waiting = schedule.waiting
    said = "; ".join(
        f"rank {rank} entered {schedule.called(waiting[rank])} ({waiting[rank].where}) and not "
        + " and ".join(
            sorted({schedule.called(call) for call in waiting.values() if rank in _missing_in(schedule, call)})
        )
        for rank in sorted(new)
    )
    return Blame(ORDER, tuple(sorted(new)), f"the order of calls differs: {said}")


def _missing_in(schedule: Schedule, call: Call) -> tuple[int, ...]:
    return schedule.missing((call.group, call.number))


@dataclass(frozen=True)
class Replay:
    """A schedule made again. events: (rank, "enters" or "finishes", call), in order. stopped: where ranks wait."""

    events: tuple[tuple[int, str, Call], ...]
    stopped: Mapping[int, Place]


def replay(schedule: Schedule, seed: int) -> Replay:
    """Run the schedule with ranks that take turns at random.

    A rank enters its calls in their order. It is known to have waited for a call where that had finished before it
    entered the next one; of others nobody knows, so none is held up by them. A call finishes when all members have
    entered it.

    Args:
        schedule: the calls.
        seed: of the turns.
    """
    turns, events = random.Random(seed), list[tuple[int, str, Call]]()
    position = dict.fromkeys(schedule.written, 0)
    # Of each rank the calls that it has entered and that have not finished, and when they had in the run.
    under_way: dict[int, dict[Place, int | None]] = {rank: {} for rank in schedule.written}
    entered = Counter[Place]()

    def can_go_on(rank: int) -> bool:
        calls, place = schedule.written[rank].calls, position[rank]
        if place == len(calls):
            return False
        return not any(at is not None and at <= calls[place].entered_ns for at in under_way[rank].values())

    ready = [rank for rank in position if can_go_on(rank)]
    while ready:
        rank = turns.choice(ready)
        call = schedule.written[rank].calls[position[rank]]
        position[rank] += 1
        place = (call.group, call.number)
        entered[place] += 1
        under_way[rank][place] = call.finished_ns
        events.append((rank, "enters", call))
        changed = [rank]
        if entered[place] == len(schedule.by_place[place]) and _can_finish(schedule, place):
            changed = sorted(schedule.by_place[place])
            for member in changed:
                del under_way[member][place]
                events.append((member, "finishes", call))
        ready = sorted((set(ready) - set(changed)) | {each for each in changed if can_go_on(each)})
    return Replay(tuple(events), {rank: next(iter(places)) for rank, places in under_way.items() if places})


def stopped_in_run(schedule: Schedule) -> dict[int, Place]:
    """Where the ranks waited in the run itself."""
    return {rank: (call.group, call.number) for rank, call in schedule.waiting.items()}


def _can_finish(schedule: Schedule, place: Place) -> bool:
    """Whether a call finishes once all that are written have entered it.

    Different collectives under one number met only where the run says so.
    """
    calls = schedule.by_place[place].values()
    alike = len({call.kind for call in calls}) == 1
    return not schedule.missing(place) and (alike or all(call.finished_ns is not None for call in calls))


def _sized(call: Call) -> str:
    """A call with the sizes of what was given."""
    return f"{call.name}({', '.join('x'.join(map(str, size)) for size in call.sizes)})"


def named(ranks: Collection[int]) -> str:
    """`rank 1`, `ranks 0 and 2`."""
    shown = [str(rank) for rank in sorted(ranks)]
    if len(shown) == 1:
        return f"rank {shown[0]}"
    shown = shown if len(shown) <= 8 else [*shown[:6], f"{len(shown) - 6} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
