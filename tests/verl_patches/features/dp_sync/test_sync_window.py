"""Sync windows in simulated schedules: every rank makes the same forwards, and a broken promise is detected."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.verl_patches.features.dp_sync.simulated_ranks import Diverged, Rank, Sequence, Totals, run
from verl_patches.features.dp_sync.feature import DpSyncSettings
from verl_patches.features.dp_sync.sync_window import (
    LocalState,
    Progress,
    ReducedState,
    SyncWindow,
    SyncWindowError,
    decide,
    encode,
    steps_in_hand,
)

SCHEDULES = 150
LONGEST = 40  # prompt and response, in tokens
BLOCK = 4


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    prompt = draw(st.integers(1, 12))
    return Sequence(prompt, draw(st.integers(1, LONGEST - prompt)), draw(st.sampled_from([0, 0, 0, 0, 3, 17, 40])))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[Rank]]:
    """Draw (longest window, ranks). The smallest cache holds one sequence; some ranks may have no work."""
    limit, ranks = draw(st.sampled_from([1, 2, 5, 16])), draw(st.sampled_from([2, 3, 4, 8, 64]))
    several = st.lists(sequences(), max_size=6 if ranks < 64 else 2)
    return limit, [
        Rank(SyncWindow(rank, ranks, limit), draw(several), draw(st.integers(LONGEST // BLOCK, 30)), BLOCK)
        for rank in range(ranks)
    ]


def lengths(ranks: list[Rank]) -> list[Sequence]:
    return [each for rank in ranks for each in rank.sequences]


def check_schedule(limit: int, ranks: list[Rank]) -> Totals:
    """Check that ranks do not diverge, that every token is made, and that there are as few agreements as promised."""
    everything = lengths(ranks)
    totals = run(ranks)
    assert not totals.errors
    late = [each for rank in ranks for each in rank.sequences]  # for the next rollout: arrived after the end
    assert all(each.done == each.length for each in everything if each not in late)
    assert {rank.forwards for rank in ranks} == {totals.forwards}
    prefills = ranks[0].prefills
    assert totals.agreements <= prefills + (totals.forwards - prefills) / limit + 2 + interrupted(everything)
    return totals


def interrupted(everything: list[Sequence]) -> int:
    """Count the windows that end early because no rank had more work until a late prompt arrived."""
    return len({each.arrives for each in everything if each.arrives})


def exhaustively(test):
    return settings(max_examples=10_000, suppress_health_check=list(HealthCheck), derandomize=True)(test)


@pytest.mark.parametrize(
    "offered, fits",
    [
        (LocalState(4, 3, False, False), True),
        (LocalState(2, 2, False, True), True),
        (LocalState(4, 4, False, False), False),  # padding is no promise
        (LocalState(4, 3, True, False), False),
    ],
)
def test_forward_fits_by_its_own_tokens(offered, fits):
    window = SyncWindow(1, 2, 8)
    assert window.goes_on()
    vectors = [
        encode(LocalState(8, 7, False, False, steps=4, work=4), Progress(), 0, 2),
        encode(LocalState(4, 3, False, False, steps=4, work=4), Progress(), 1, 2),
    ]
    window.accept([max(pair) for pair in zip(*vectors, strict=True)])
    assert window.fits(offered) == fits
    vectors[0] = encode(LocalState(1, 0, False, False, work=0), Progress(), 0, 2)
    idle = SyncWindow(0, 2, 8)
    idle.goes_on()
    idle.accept([max(pair) for pair in zip(*vectors, strict=True)])
    assert idle.fits(LocalState(1, 1, False, False)) and not idle.fits(LocalState(2, 2, False, False))


@settings(max_examples=SCHEDULES, suppress_health_check=list(HealthCheck))
@given(schedules())
def test_all_ranks_make_the_same_forwards(schedule):
    check_schedule(*schedule)


@pytest.mark.exhaustive
@exhaustively
@given(schedules())
def test_all_ranks_make_the_same_forwards_in_ten_thousand_schedules(schedule):
    check_schedule(*schedule)


def tight_ranks(limit: int, **of_rank_1: bool) -> list[Rank]:
    """Return three ranks whose sequences need more blocks than there are."""
    work = [Sequence(4, 30) for _ in range(4)]
    options: list[dict[str, bool]] = [{}, of_rank_1, {}]
    return [Rank(SyncWindow(rank, 3, limit), copy.deepcopy(work), 12, BLOCK, **options[rank]) for rank in range(3)]


def test_preemption_happens_between_windows_only():
    ranks = tight_ranks(limit=16)
    check_schedule(16, ranks)
    assert all(rank.preempted for rank in ranks)


@pytest.mark.parametrize("fault", ["overstates", "sneaks_prompts_in"])
def test_a_rank_that_promises_too_much_is_named_on_all_ranks(fault):
    totals = run(tight_ranks(16, **{fault: True}))
    assert len(totals.errors) == 3 and len(set(totals.errors)) == 1
    assert "rank 1 could not keep its sync window" in totals.errors[0]


def test_a_rank_that_leaves_its_window_at_once_diverges(monkeypatch):
    """The control of the test above: without the dummy forwards, the other ranks would wait."""
    monkeypatch.setattr(SyncWindow, "cannot_keep", _leave)
    with pytest.raises(Diverged):
        run(tight_ranks(16, sneaks_prompts_in=True))


def _leave(window: SyncWindow) -> None:
    window.left = 0


def test_a_rank_that_does_not_say_that_it_is_unfinished_is_left_behind(monkeypatch):
    """The control of the unfinished flag, which is derived from the work that a rank announces."""
    promise = Rank._promise

    def silent(self: Rank, mine: LocalState) -> LocalState:
        offer = promise(self, mine)
        return replace(offer, work=0) if self.window.rank == 1 else offer

    monkeypatch.setattr(Rank, "_promise", silent)
    ranks = tight_ranks(16)
    del ranks[0].sequences[1:], ranks[2].sequences[1:]
    with pytest.raises(AssertionError):
        check_schedule(16, ranks)


def test_the_worked_example_of_a_vector():
    offer = LocalState(
        4, 3, with_prefill=True, two_batches=False, steps=7, work=5, running=3, headroom=5, waiting=True, finished=6
    )
    counts = [0, 4, 0, 3, 0, 3, 0, 5, 0, 6]
    assert encode(offer, Progress(forwards=9, idle=2), 1, 2) == [*counts, 1, 1, 1, 0, -7, 5, 0, 9, -9, -2]


def reduced(*offers: LocalState) -> list[int]:
    vectors = [encode(offer, Progress(3), rank, len(offers)) for rank, offer in enumerate(offers)]
    return [max(column) for column in zip(*vectors, strict=True)]


@pytest.mark.parametrize(
    ("steps", "work", "prefill", "limit", "window"),
    [
        ((9, 12), (20, 3), False, 16, 9),
        ((9, 12), (20, 3), False, 4, 4),
        ((9, 12), (2, 3), False, 16, 3),
        ((9, 12), (20, 3), True, 16, 1),
        ((16, 16), (0, 0), False, 16, 0),
        ((0, 12), (20, 3), False, 16, 1),
    ],
)
def test_the_window_is_the_smallest_promise(steps, work, prefill, limit, window):
    offers = [LocalState(2, 2, prefill and not rank, True, steps[rank], work[rank]) for rank in range(2)]
    agreed = decide(reduced(*offers), 2, limit)
    assert agreed == ReducedState(
        (2, 2), (2, 2), prefill, True, window, 0, running=(0, 0), headroom=(0, 0), finished=(0, 0)
    )
    assert agreed.unfinished == bool(window)


def test_counts_of_requests_are_known_by_rank_and_whether_any_waits():
    offers = [
        LocalState(4, 3, False, True, running=3, headroom=1),
        LocalState(1, 1, False, True, headroom=4, waiting=True),
    ]
    agreed = decide(reduced(*offers), 2, 16)
    assert (agreed.running, agreed.headroom, agreed.waiting) == ((3, 0), (1, 4), True)


def test_finished_groups_are_known_by_rank_and_whether_any_rank_holds_the_others():
    offers = [LocalState(4, 3, False, True, finished=2), LocalState(1, 1, False, True, finished=5, held=True)]
    agreed = decide(reduced(*offers), 2, 16)
    assert (agreed.finished, agreed.held) == ((2, 5), True)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=12), st.booleans())
def test_wasted_forwards_are_the_last_ones_without_a_request(forwards, again):
    """`forwards`: whether each of three ranks was idle, per forward. A late prompt makes the idle forwards before it
    useful. A new rollout counts from zero."""
    windows = [SyncWindow(rank, 3, 4) for rank in range(3)]
    for window in windows:
        if again:
            window.goes_on()
            for idle in (True, False, True):
                window.take(idle)
            window.accept(reduced(*[LocalState(1, 1, False, True, work=0)] * 3))
            assert not window.goes_on()
        assert window.goes_on()
    for idle in forwards:
        for window, alone in zip(windows, idle, strict=True):
            window.take(alone)
    vectors = [window.vector(LocalState(1, 1, False, True, work=0)) for window in windows]
    agreed = windows[0].accept([max(column) for column in zip(*vectors, strict=True)])
    wasted = 0
    while wasted < len(forwards) and all(forwards[-1 - wasted]):
        wasted += 1
    assert (agreed.wasted, agreed.unfinished) == (wasted, False)


def test_ranks_that_made_different_forwards_all_raise():
    vectors = [
        encode(LocalState(1, 1, False, False), Progress(forwards), rank, 2) for rank, forwards in enumerate((4, 5))
    ]
    with pytest.raises(SyncWindowError, match="different numbers of forwards, from 4 to 5"):
        decide([max(column) for column in zip(*vectors, strict=True)], 2, 16)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=5), st.integers(1, 16))
def test_steps_in_hand_end_before_the_first_block_that_is_missing(requests, limit):
    assert steps_in_hand(requests, limit) == _naive(requests, limit)


def _naive(requests: list[tuple[int, int]], limit: int) -> int:
    """Count forward by forward: after the first, each needs one more slot of every request that still runs."""
    made = 1
    while made < limit and all(needed <= made or slots >= made for slots, needed in requests):
        made += 1
    return made


def test_a_window_of_no_step_rejected():
    assert DpSyncSettings.__dataclass_fields__["lease_steps"].metadata["at_least"] == 1
