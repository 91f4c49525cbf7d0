"""What is said of a collective that fails in a reshard."""

import pytest
import torch.distributed as dist

from post_training.reshard.failure import Attempt, ReshardError, RollCall, naming_the_missing


class EverybodyIsHere(RollCall):
    """A roll call without a process group, of which other tests may have made one."""

    def missing(self) -> list[int]:
        return []


@pytest.fixture
def roll_call(monkeypatch: pytest.MonkeyPatch) -> RollCall:
    monkeypatch.setattr(dist, "get_rank", {None: 0}.get)
    return EverybodyIsHere(None, "reshard", seconds=1.0)


def fail(text: str) -> None:
    raise RuntimeError(text)


def said(attempt: Attempt, roll_call: RollCall) -> str:
    with pytest.raises(ReshardError) as raised, naming_the_missing(attempt, roll_call):
        fail("connection closed by peer")
    return str(raised.value)


def test_a_failed_collective_says_how_far_the_rank_had_come(roll_call):
    attempt = Attempt()
    attempt.reached = "in round 2"
    told = "reshard: rank 0 heard from all ranks, and a collective failed, in round 2 or before it: "
    assert said(attempt, roll_call) == told + "connection closed by peer"


def test_what_the_rank_was_told_first_is_kept(roll_call):
    """As where HCCL's work fails while the next step of the host runs, which hears of it."""
    attempt = Attempt()
    attempt.step("in round 1, ", fail, "HcclAlltoAllV: no answer from rank 2")
    told = (
        "before the first round or before it: in round 1, HcclAlltoAllV: no answer from rank 2; then connection closed"
    )
    assert told in said(attempt, roll_call)


class Store:
    """The store of 256 ranks of which some never answer, under a clock that only waiting turns."""

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
    """A node that is gone takes its 16 ranks with it."""
    store = Store(silent)
    monkeypatch.setattr(dist, "get_world_size", {None: 256}.get)
    monkeypatch.setattr(dist, "get_rank", {None: 0}.get)
    monkeypatch.setattr(dist, "PrefixStore", lambda name, of: store)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    assert RollCall(None, "reshard", seconds=10.0).missing() == silent
    assert store.seconds == (10.0 if silent else 0.0)


def test_what_all_ranks_agreed_on_is_left_as_it_is(roll_call):
    with pytest.raises(ReshardError, match="^agreed$"), naming_the_missing(Attempt(), roll_call):
        raise ReshardError("agreed")
