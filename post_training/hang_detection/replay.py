"""Analyse the calls of a hung run: find who waits for whom and which rank is to blame, and replay the schedule.

Ranks meet in calls of the same number of a group. A rank that waits in call 7 of a group waits for the members that
have not entered call 7. Nothing more is needed to tell four causes apart:

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

from post_training.hang_detection.calls import Call, RankCalls, RankGroup

SKIPPED, NO_ANSWER, COMPUTES, ORDER, DEVICE = "skipped", "no answer", "computes", "order", "device"
# Calls that are compared to recognise skipped or added ones; up to one less is recognised at once.
_MOST_SHIFT = 8
# A rank that hangs writes its file every few seconds.
_OUTDATED_S = 60

Place = tuple[str, int]
"""A call: name of the group, and number."""


@dataclass(frozen=True)
class Blame:
    """The cause of a hang.

    Attributes:
        cause: one of the constants above.
        ranks: those to blame; empty if none of them is.
        sentence: explains the hang to a person.
    """

    cause: str
    ranks: tuple[int, ...]
    sentence: str


@dataclass(frozen=True)
class Schedule:
    """The collectives that the ranks of a hung run called.

    Args:
        written: what each rank wrote, by rank.
    """

    written: Mapping[int, RankCalls]

    @cached_property
    def groups(self) -> dict[str, RankGroup]:
        """All groups, by name."""
        return {group.name: group for own in self.written.values() for group in own.groups}

    @cached_property
    def by_place(self) -> dict[Place, dict[int, Call]]:
        """The ranks' own records of each call, by rank."""
        found: dict[Place, dict[int, Call]] = {}
        for rank, own in self.written.items():
            for call in own.calls:
                found.setdefault((call.group, call.number), {})[rank] = call
        return found

    @cached_property
    def _oldest(self) -> dict[tuple[int, str], int]:
        """The lowest call number of each group that a rank's buffer still has."""
        found: dict[tuple[int, str], int] = {}
        for rank, own in self.written.items():
            for call in own.calls:
                found.setdefault((rank, call.group), call.number)
        return found

    def was_entered(self, rank: int, place: Place) -> bool:
        """Return whether a rank has entered a call, according to the files.

        A call older than the rank's buffer counts as entered. A rank without a file has entered every call that
        finished on another rank.
        """
        calls, oldest = self.by_place.get(place, {}), self._oldest.get((rank, place[0]))
        finished_elsewhere = rank not in self.written and any(call.finished_ns is not None for call in calls.values())
        return rank in calls or (oldest is not None and place[1] < oldest) or finished_elsewhere

    def missing(self, place: Place) -> tuple[int, ...]:
        """Return the members of a group that have not entered a call."""
        members = self.groups[place[0]].ranks if place[0] in self.groups else tuple(self.by_place[place])
        return tuple(rank for rank in members if not self.was_entered(rank, place))

    def written_at(self, rank: int) -> float:
        """Return when a rank last wrote, in unix seconds; 0 if it never did."""
        return self.written[rank].time if rank in self.written else 0.0

    @property
    def waiting(self) -> dict[int, Call]:
        """The call that each waiting rank waits in, by rank."""
        return {rank: call for rank, own in self.written.items() if (call := own.waits_for) is not None}

    def called(self, call: Call) -> str:
        """Describe a call in words."""
        return f"{call.name} {call.number} of {self.groups.get(call.group, RankGroup(call.group, '', ()))}"


def blame(schedule: Schedule) -> Blame | None:
    """Find the cause of a hang; None if no rank waits in a collective."""
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
        sentence = f"{named(absent)} recorded no calls while others did: ended, stopped, or still making progress"
        return Blame(NO_ANSWER, tuple(sorted(absent)), sentence)
    computing = missing - waiting.keys()
    if computing:
        places = ", ".join(f"rank {rank} {schedule.written[rank].where}" for rank in sorted(computing))
        sentence = f"{named(computing)} did not enter a collective that others wait in: {places}"
        return Blame(COMPUTES, tuple(sorted(computing)), sentence)
    if not missing:
        return Blame(DEVICE, (), "every rank has entered its collective; check devices and network")
    return _out_of_order(schedule, missing)


def _different(schedule: Schedule) -> Blame | None:
    """Find the first call for which ranks have different collectives under the same number."""
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
    """Say whether the odd rank skipped calls, and so is ahead of the others, or made additional ones."""
    group, number = place
    member = next(rank for rank, call in schedule.by_place[place].items() if call.kind == usual.kind)

    def kinds(rank: int, first: int) -> list[tuple[object, ...]]:
        found = [schedule.by_place.get((group, first + step), {}).get(rank) for step in range(_MOST_SHIFT)]
        return [call.kind for call in found if call is not None]

    def alike(one: list[tuple[object, ...]], other: list[tuple[object, ...]]) -> int:
        """Return how many calls are the same; 0 if one of them differs."""
        pairs = list(zip(one, other, strict=False))
        return len(pairs) if all(own == their for own, their in pairs) else 0

    own, found = schedule.by_place[place][odd], list[tuple[int, int, str]]()
    for shift in range(1, _MOST_SHIFT):
        calls = "the call" if shift == 1 else f"{shift} calls"
        skipped = f"it skipped {calls} from {usual.name} {number} on ({usual.where} on rank {member})"
        found.append((alike(kinds(odd, number), kinds(member, number + shift)), -shift, skipped))
        added = f"it made {calls} more, from {own.name} {number} on ({own.where})"
        found.append((alike(kinds(odd, number + shift), kinds(member, number)), -shift, added))
    longest, _, said = max(found)
    return said if longest else f"{own.where} on rank {odd}, {usual.where} on rank {member}"


def _out_of_order(schedule: Schedule, missing: Collection[int]) -> Blame:
    """Blame a rank when each waits for another: the one that never before went from its last call to this one."""
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
    if not new or new >= set(missing):  # all or none do something new: blame those whom the most wait for
        counts = Counter(
            rank for call in schedule.waiting.values() for rank in schedule.missing((call.group, call.number))
        )
        most = max(counts.values())
        new = {rank for rank in missing if counts[rank] == most}
    waiting = schedule.waiting
    said = "; ".join(
        f"rank {rank} entered {schedule.called(waiting[rank])} ({waiting[rank].where}) instead of "
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
    """A replayed schedule.

    Attributes:
        events: (rank, "enters" or "finishes", call), in order.
        stopped: the call that each waiting rank waits in.
    """

    events: tuple[tuple[int, str, Call], ...]
    stopped: Mapping[int, Place]


def replay(schedule: Schedule, seed: int) -> Replay:
    """Run the schedule with ranks that take turns at random.

    A rank enters its calls in their order. If a call had finished before the rank entered the next one, the rank waits
    for it here too; otherwise it is not known whether it waited, so it goes on. A call finishes when all members have
    entered it.

    Args:
        schedule: the calls.
        seed: of the random turns.
    """
    turns, events = random.Random(seed), list[tuple[int, str, Call]]()
    position = dict.fromkeys(schedule.written, 0)
    # By rank: calls that it has entered and that have not finished, with the time at which they finished in the run.
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
    """Return the call that each rank waited in, in the run itself."""
    return {rank: (call.group, call.number) for rank, call in schedule.waiting.items()}


def _can_finish(schedule: Schedule, place: Place) -> bool:
    """Return whether a call finishes once all ranks that have it in their files have entered it.

    Different collectives under one number meet only if they finished in the run.
    """
    calls = schedule.by_place[place].values()
    alike = len({call.kind for call in calls}) == 1
    return not schedule.missing(place) and (alike or all(call.finished_ns is not None for call in calls))


def _sized(call: Call) -> str:
    """Format a call with the sizes of its inputs."""
    return f"{call.name}({', '.join('x'.join(map(str, size)) for size in call.sizes)})"


def named(ranks: Collection[int]) -> str:
    """`rank 1`, `ranks 0 and 2`."""
    shown = [str(rank) for rank in sorted(ranks)]
    if len(shown) == 1:
        return f"rank {shown[0]}"
    shown = shown if len(shown) <= 8 else [*shown[:6], f"{len(shown) - 6} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
