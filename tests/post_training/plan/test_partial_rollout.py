"""Groups that continue in later steps: none is lost or trained on twice, and no token is older than the limit."""

from __future__ import annotations

import random as randoms
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from post_training.plan.partial_rollout import GroupsInFlight, PartialRollout, ages, may_end, spread

Segments = tuple[tuple[int, int], ...]


@dataclass
class Trained:
    """A simulated step: the prompts that it trained on, with the segments of their answers."""

    step: int
    prompts: list[tuple[int, int]]
    segments: list[list[Segments]]


def lengths_of(prompt: tuple[int, int], answers: int, longest: int) -> list[int]:
    draw = randoms.Random(prompt[1])
    return [draw.randint(1, longest) for _ in range(answers)]


def left(segments: Segments, length: int) -> int:
    return length - sum(tokens for _, tokens in segments)


def grown(segments: Segments, step: int, tokens: int) -> Segments:
    return (*segments, (step, tokens)) if tokens else segments


def decoded(left: list[list[int]], due: list[bool], batch: int) -> list[list[int]]:
    """Return the tokens left when the rollout may end, giving every unfinished answer one token at a time."""

    def held() -> bool:
        return any(is_due and any(each) for is_due, each in zip(due, left, strict=True))

    while not may_end((not any(each) for each in left), batch, held()):
        left = [[max(0, tokens - 1) for tokens in each] for each in left]
    return left


def simulated(policy: PartialRollout, steps: int, answers: int, longest: int, due: bool = True) -> list[Trained]:
    """Simulate all steps of a run. With due=False no group ever becomes overdue."""
    groups: GroupsInFlight[list[Segments]] = GroupsInFlight(policy)
    found, handed_out = [], 0
    for step in range(1, steps + 1):
        number = policy.fresh(len(groups), steps - step + 1)
        groups.begin(step, [(0, row) for row in range(handed_out, handed_out + number)], [()] * answers)
        handed_out += number
        before = [
            [left(part, length) for part, length in zip(group.content, lengths, strict=True)]
            for group in groups.groups
            for lengths in [lengths_of(group.prompt, answers, longest)]
        ]
        after = decoded(before, [due and each for each in groups.overdue(step)], policy.batch)
        groups.update(
            [
                [grown(part, step, had - has) for part, had, has in zip(group.content, *counts, strict=True)]
                for group, *counts in zip(groups.groups, before, after, strict=True)
            ]
        )
        taken = groups.take([not any(each) for each in after])
        found.append(Trained(step, [group.prompt for group in taken], [group.content for group in taken]))
        assert handed_out == len(groups) + policy.batch * step, "nothing is lost"
    assert not len(groups), "nothing is begun that is not trained on"
    return found


def oldest(found: list[Trained]) -> int:
    return max(age for each in found for parts in each.segments for part in parts for age in ages(each.step, part))


RUNS = st.tuples(
    st.integers(1, 3).flatmap(lambda m: st.tuples(st.integers(1, 4).map(lambda b: m * b), st.just(m))),
    st.sampled_from([0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 1.0]),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 20),
)


@settings(max_examples=150)
@given(RUNS)
def test_every_group_is_trained_on_once_and_whole_and_no_token_is_too_old(run):
    (batch, multiple), threshold, max_steps, steps, answers, longest = run
    found = simulated(PartialRollout(batch, threshold, max_steps, multiple), steps, answers, longest)
    trained = [prompt for each in found for prompt in each.prompts]
    assert Counter(trained) == Counter((0, row) for row in range(batch * steps))
    for each in found:
        assert len(each.prompts) == batch and each.prompts == sorted(each.prompts)
        for prompt, segments in zip(each.prompts, each.segments, strict=True):
            whole = lengths_of(prompt, answers, longest)
            assert [sum(tokens for _, tokens in part) for part in segments] == whole
    assert oldest(found) <= max_steps


@settings(max_examples=50)
@given(RUNS)
def test_with_a_threshold_of_1_the_steps_are_those_without(run):
    (batch, multiple), _, max_steps, steps, answers, longest = run
    found = simulated(PartialRollout(batch, 1.0, max_steps, multiple), steps, answers, longest)
    for each in found:
        assert each.prompts == [(0, row) for row in range(batch * (each.step - 1), batch * each.step)]
    assert oldest(found) == 0


def test_without_what_is_due_tokens_get_older():
    """The control for the age: without overdue groups, tokens exceed the limit."""
    policy = PartialRollout(4, 0.5, 1)
    assert oldest(simulated(policy, 12, 2, 40)) == 1 < oldest(simulated(policy, 12, 2, 40, due=False))


def test_below_the_least_threshold_tokens_get_older():
    """The control for rejecting such thresholds: overdue groups do not fit into the batch."""
    assert oldest(simulated(PartialRollout(2, 0.2, 1), 12, 1, 3)) > 1


def test_prompts_in_flight():
    assert [PartialRollout(32, each, 1).in_flight for each in (1.0, 0.8, 0.9, 0.5)] == [32, 40, 36, 64]
    policy = PartialRollout(32, 0.9, 1, multiple=8)
    assert policy.in_flight == 40
    assert [policy.fresh(carried, left) for carried, left in ((0, 9), (8, 9), (8, 1), (40, 9))] == [40, 32, 24, 0]


def test_a_step_that_cannot_be_filled_is_an_error():
    groups: GroupsInFlight[None] = GroupsInFlight(PartialRollout(2, 1.0, 1))
    groups.begin(1, [(0, 0), (0, 1)], None)
    with pytest.raises(ValueError, match="1 groups are finished, but a step trains on 2"):
        groups.take([True, False])


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 6))
def test_what_was_begun_before_is_spread(carried, fresh, parts):
    old, new = list(range(carried)), list(range(carried, carried + fresh))
    if (carried + fresh) % parts:
        with pytest.raises(ValueError, match="do not divide"):
            spread(old, new, parts)
        return
    order, each = spread(old, new, parts), (carried + fresh) // parts
    assert sorted(order) == old + new
    assert [row for row in order if row >= carried] == new
    numbers = [sum(row < carried for row in order[part * each : (part + 1) * each]) for part in range(parts)]
    assert max(numbers) - min(numbers) <= 1
