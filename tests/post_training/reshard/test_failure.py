"""Errors for a collective that fails in a reshard."""

import pytest
import torch
import torch.distributed as dist

from post_training.reshard.failure import Attempt, MembershipCheck, ReshardError, agree_on_success, naming_the_missing


class EverybodyIsHere(MembershipCheck):
    """A membership check that finds all ranks, and uses no process group, which other tests may have left."""

    def missing(self) -> list[int]:
        return []


@pytest.fixture
def membership(monkeypatch: pytest.MonkeyPatch) -> MembershipCheck:
    monkeypatch.setattr(dist, "get_rank", {None: 0}.get)
    return EverybodyIsHere(None, "reshard", seconds=1.0)


def fail(text: str) -> None:
    raise RuntimeError(text)


def said(attempt: Attempt, membership: MembershipCheck) -> str:
    with pytest.raises(ReshardError) as raised, naming_the_missing(attempt, membership):
        fail("connection closed by peer")
    return str(raised.value)


def test_a_failed_collective_says_how_far_the_rank_had_come(membership):
    attempt = Attempt()
    attempt.reached = "in bucket 2"
    told = "reshard: rank 0 heard from all ranks, and a collective failed, in bucket 2 or before it: "
    assert said(attempt, membership) == told + "connection closed by peer"


def test_what_the_rank_was_told_first_is_kept(membership):
    """HCCL's work may fail while the host already runs the next step, which then sees the error."""
    attempt = Attempt()
    attempt.step("in bucket 1, ", fail, "HcclAlltoAllV: rank 2 is silent")
    told = "before the first bucket or before it: in bucket 1, HcclAlltoAllV: rank 2 is silent; then connection closed"
    assert told in said(attempt, membership)


class Store:
    """A store for 256 ranks, some of which never answer, with a clock that only advances while waiting."""

    def __init__(self, silent):
        self.silent, self.seconds = set(map(str, silent)), 0.0

    def set(self, key, value):
        assert (key, value) == ("0", "here")

    def wait(self, keys, limit):
        if self.silent & set(keys):
            self.seconds += limit.total_seconds()
            raise dist.DistStoreError("wait timeout")

    def check(self, keys):
        return not self.silent & set(keys)


@pytest.mark.parametrize("silent", [[], [7], list(range(16, 32)), list(range(1, 256))])
def test_missing_ranks_share_one_deadline(monkeypatch, silent):
    """A lost node takes its 16 ranks with it."""
    store = Store(silent)
    monkeypatch.setattr(dist, "get_world_size", {None: 256}.get)
    monkeypatch.setattr(dist, "get_rank", {None: 0}.get)
    monkeypatch.setattr(dist, "PrefixStore", lambda name, of: store)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    assert MembershipCheck(None, "reshard", seconds=10.0).missing() == silent
    assert store.seconds == (10.0 if silent else 0.0)


def test_error_agreed_by_all_ranks_unchanged(membership):
    with pytest.raises(ReshardError, match="^agreed$"), naming_the_missing(Attempt(), membership):
        raise ReshardError("agreed")


def test_failed_attempt_runs_no_further_step():
    attempt, done = Attempt(), []
    attempt.step("in bucket 1, ", done.append, 1)
    attempt.step("in bucket 2, ", fail, "first")
    attempt.step("in bucket 3, ", done.append, 3)
    attempt.step("in bucket 4, ", fail, "second")
    assert (done, attempt.failure) == ([1], "in bucket 2, first")


@pytest.mark.parametrize(
    "failures, said",
    [
        (["", "", "in bucket 1, a", ""], "reshard: rank 2 failed in bucket 1, a"),
        (["", "in bucket 1, a", "", "in bucket 2, b"], "reshard: rank 1 failed in bucket 1, a (and 1 other rank)"),
        (["x", "y", "z", ""], "reshard: rank 0 failed x (and 2 other ranks)"),
    ],
)
def test_each_rank_raises_with_the_first_and_a_count(monkeypatch, failures, said):
    def all_reduce(own, operation, group):
        assert (operation, group) == (dist.ReduceOp.MAX, "group")
        own.fill_(max(map(bool, failures)))

    def gather(into, own, group):
        assert (own, group) == (failures[0], "group")
        into[:] = failures

    monkeypatch.setattr(dist, "get_world_size", {"group": 4}.get)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    attempt = Attempt()
    attempt.failure = failures[0]
    with pytest.raises(ReshardError) as raised:
        agree_on_success(attempt, "group", torch.device("cpu"))
    assert str(raised.value) == said


def agree_at(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Agree as rank 0 of ranks that are at these steps."""

    def all_reduce(own, operation, group):
        assert own.tolist() == [0, steps[0], -steps[0]]
        own.copy_(torch.tensor([0, max(steps), -min(steps)]))

    def gather(into, own, group):
        into[:] = [own, *(f"step {step}" if step < max(steps) else "" for step in steps[1:])]

    monkeypatch.setattr(dist, "get_world_size", {"group": len(steps)}.get)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    agree_on_success(Attempt(), "group", torch.device("cpu"), steps[0])


def test_rank_at_another_step_fails_on_every_rank(monkeypatch):
    agree_at([7, 7, 7], monkeypatch)
    with pytest.raises(ReshardError, match="rank 0 failed with the weights of step 6, but another rank is at step 7"):
        agree_at([6, 7, 7], monkeypatch)
    with pytest.raises(ReshardError, match="^reshard: rank 2 failed step 0$"):
        agree_at([7, 7, 0], monkeypatch)


def test_store_of_several_worlds_is_kept_by_rank_0_of_the_group(monkeypatch):
    """Rank 0 of the group keeps the store, whatever the ranks' numbers in this world."""

    class Lost:
        def set(self, key, value):
            raise RuntimeError("the connection is lost")

    monkeypatch.setattr(dist, "get_world_size", {"group": 3}.get)
    monkeypatch.setattr(dist, "get_rank", {"group": 2}.get)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank - 2)
    monkeypatch.setattr(dist, "PrefixStore", lambda name, of: of)
    assert MembershipCheck("group", "reshard", 1.0, Lost()).missing() == [0]


def test_keeper_of_a_lost_store_named_by_group_rank(monkeypatch):
    """The group consists of the world's ranks 2, 0 and 1."""

    def lost(*_):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(dist, "get_world_size", {"group": 3}.get)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: {"group": [2, 0, 1]}[group][rank])
    monkeypatch.setattr(dist, "PrefixStore", lost)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    assert MembershipCheck("group", "reshard", seconds=1.0).missing() == [1]
