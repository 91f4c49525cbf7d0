"""The rank to blame for a hang, and the result of a replay, for hand-made schedules and one of 256 ranks."""

import pytest

from post_training.hang_detection.calls import Call, RankCalls, RankGroup
from post_training.hang_detection.replay import (
    COMPUTES,
    DEVICE,
    NO_ANSWER,
    ORDER,
    SKIPPED,
    Schedule,
    blame,
    replay,
    stopped_in_run,
)

SEEDS = range(1, 20)
NAMES = {"a": "all_reduce", "b": "broadcast", "g": "all_gather"}


def written(rank, calls, groups, *, finished, time=1000.0, first=1):
    """Make a rank's calls from words such as `x.a`, an all_reduce of group x; the first `finished` of them finished."""
    counts, made = dict.fromkeys(groups, first - 1), []
    for place, word in enumerate(calls.split()):
        group, name = word.split(".")
        counts[group] += 1
        ended = place * 10 + 5 if place < finished else None
        made.append(Call(group, counts[group], NAMES[name], ((4,),), place * 10, ended, f"train.py:{place} in step"))
    known = tuple(RankGroup(name, "", members) for name, members in groups.items())
    return RankCalls(rank, time, "update", "at mlp.py:7 in forward", known, tuple(made))


def schedule(*ranks, groups=None, **named):
    groups = groups or {"x": (0, 1, 2), "y": (0, 1, 2)}
    return Schedule({rank: written(rank, calls, groups, finished=done, **named) for rank, (calls, done) in ranks})


def same_place(found):
    return all(dict(replay(found, seed).stopped) == stopped_in_run(found) for seed in SEEDS)


def test_no_rank_waits_when_all_have_finished():
    found = schedule((0, ("x.a y.a", 2)), (1, ("x.a y.a", 2)), (2, ("x.a y.a", 2)))
    assert blame(found) is None and same_place(found)
    assert not replay(found, 1).stopped


@pytest.mark.parametrize("skipped", [1, 2])
def test_a_rank_that_left_out_calls_is_named_with_them(skipped):
    others = ("x.a x.b x.g x.a x.b", 1)
    own = (" ".join(others[0].split()[:1] + others[0].split()[1 + skipped :]), 1)
    found = schedule((0, others), (1, own), (2, others))
    said = blame(found)
    assert (said.cause, said.ranks) == (SKIPPED, (1,))
    calls = {1: "the call", 2: "2 calls"}[skipped]
    assert f"it skipped {calls} from broadcast 2 on (train.py:1 in step on rank 0)" in said.sentence
    assert same_place(found)


def test_a_rank_with_a_call_more_is_named_with_it():
    found = schedule((0, ("x.a x.b x.a", 1)), (1, ("x.a x.g x.b x.a", 1)), (2, ("x.a x.b x.a", 1)))
    assert "it made the call more, from all_gather 2 on" in blame(found).sentence and blame(found).ranks == (1,)


def test_a_rank_in_the_other_order_is_named_by_what_it_never_did_before():
    others = ("x.a y.a x.a y.a x.a", 4)
    found = schedule((0, others), (1, ("x.a y.a x.a y.a y.a", 4)), (2, others))
    said = blame(found)
    assert (said.cause, said.ranks) == (ORDER, (1,))
    assert "rank 1 entered all_reduce 3 of y (train.py:4 in step) instead of all_reduce 3 of x" in said.sentence
    assert same_place(found)


def test_without_a_past_the_one_whom_most_wait_for_is_named():
    found = schedule((0, ("x.a", 0)), (1, ("y.a", 0)), (2, ("x.a", 0)))
    assert (blame(found).cause, blame(found).ranks) == (ORDER, (1,))


def test_calls_that_are_not_waited_for_may_differ_in_order():
    """Two ranks that enter two groups in different orders, and only wait after both, do not hang."""
    groups = {"x": (0, 1), "y": (0, 1)}
    ranks = {rank: written(rank, "x.a y.a" if rank else "y.a x.a", groups, finished=0) for rank in (0, 1)}
    found = Schedule(ranks)
    assert not replay(found, 1).stopped
    assert blame(found).cause == DEVICE, "and the run says that it hangs, so the calls are not the reason"
    assert not same_place(found)


def test_a_rank_that_computes_is_named_with_its_place():
    found = schedule((0, ("x.a x.a", 1)), (1, ("x.a", 1)), (2, ("x.a x.a", 1)))
    said = blame(found)
    assert (said.cause, said.ranks) == (COMPUTES, (1,)) and "rank 1 at mlp.py:7 in forward" in said.sentence
    assert same_place(found)


def test_a_rank_that_waits_for_the_culprit_elsewhere_is_not_named():
    """Rank 0 waits for rank 1, which waits in another group for rank 2, which computes."""
    groups = {"x": (0, 1), "y": (1, 2)}
    found = schedule((0, ("x.a", 0)), (1, ("y.a", 0)), (2, ("", 0)), groups=groups)
    assert (blame(found).cause, blame(found).ranks) == (COMPUTES, (2,))
    assert found.missing(("x", 1)) == (1,) and same_place(found)


def test_a_rank_without_a_file_is_named():
    found = schedule((0, ("x.a x.a", 1)), (2, ("x.a x.a", 1)))
    assert (blame(found).cause, blame(found).ranks) == (NO_ANSWER, (1,))
    assert same_place(found)


def test_a_rank_that_stopped_writing_is_named():
    groups = {"x": (0, 1)}
    found = Schedule(
        {
            0: written(0, "x.a x.a", groups, finished=1, time=1000.0),
            1: written(1, "x.a", groups, finished=1, time=900.0),
        }
    )
    assert (blame(found).cause, blame(found).ranks) == (NO_ANSWER, (1,))


def test_calls_that_a_buffer_has_lost_were_entered():
    groups = {"x": (0, 1)}
    found = Schedule(
        {
            0: written(0, "x.a x.a x.a", groups, finished=2, first=5),
            1: written(1, "x.a x.a", groups, finished=1, first=6),
        }
    )
    assert found.was_entered(1, ("x", 5)) and found.missing(("x", 7)) == ()
    assert blame(found).cause == DEVICE


def test_a_seed_gives_the_same_turns_and_another_gives_others():
    found = schedule((0, ("x.a y.a x.a", 2)), (1, ("x.a y.a", 2)), (2, ("x.a y.a x.a", 2)))
    assert replay(found, 3) == replay(found, 3)
    assert len({replay(found, seed).events for seed in SEEDS}) > 1


def test_a_job_of_256_ranks_is_replayed():
    world = tuple(range(256))
    groups = {"all": world} | {f"tp{first}": world[first : first + 8] for first in range(0, 256, 8)}
    ranks = {}
    for rank in world:
        own = f"tp{rank // 8 * 8}"
        calls = f"{own}.a {own}.a all.g " * 20 + ("" if rank == 77 else f"{own}.a")
        ranks[rank] = written(rank, calls, groups, finished=60)
    found = Schedule(ranks)
    assert blame(found).ranks == (77,) and set(stopped_in_run(found)) == set(range(72, 80)) - {77} | set(
        rank for rank in world if rank // 8 != 9
    )
