"""How long ranks wait for each other's files, and what they are told, under a fake clock."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.manifest import Manifest
from post_training.hang_detection import signs
from verl_patches.features.training_checkpoint import host_agreement, restoring
from verl_patches.features.training_checkpoint.host_agreement import HostAgreement

SILENCE_S = 3600.0


class Store:
    """A store whose waits advance a fake clock; `meanwhile` stands for the other ranks' actions."""

    def __init__(self, meanwhile=lambda now: None):
        self.now, self.meanwhile = 0.0, meanwhile
        self.values, self.counters, self.deleted = {}, {}, []

    def clock(self):
        return self.now

    def set(self, key, value):
        self.values[key] = value

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return set(keys) <= self.values.keys()

    def add(self, key, amount):
        self.counters[key] = self.counters.get(key, 0) + amount
        return self.counters[key]

    def delete_key(self, key):
        self.deleted.append(key)
        self.values.pop(key, None)

    def wait(self, keys, limit):
        if not self.check(keys):
            self.now += limit.total_seconds()
            self.meanwhile(self.now)
        if not self.check(keys):
            raise dist.DistStoreError("wait timeout")


def ranks_of(store, number):
    return [HostAgreement(store, rank, number, SILENCE_S, store.clock) for rank in range(number)]


def spread(seconds, writes):
    """Rank 0 has written its file; rank 1 needs `seconds` more. `writes`: whether it makes progress in that time."""
    store = Store()
    first, second = ranks_of(store, 2)

    def meanwhile(now):
        if now >= seconds and "1/1" not in store.values:
            store.set("1/1", host_agreement.pickle.dumps("late"))
        elif writes:
            second.progress()

    store.meanwhile = meanwhile
    return store, first.exchange


def test_ranks_wait_for_a_slow_writer_of_hours():
    """8.05 TB at 0.5 GB/s takes longer than any limit of silence, and longer than HCCL's watchdog allows."""
    store, exchange = spread(16_000.0, writes=True)
    assert exchange("early") == ["early", "late"]
    assert store.now >= 16_000.0


def test_a_writer_that_stopped_is_named_on_all_ranks():
    store, exchange = spread(16_000.0, writes=False)
    says = "rank 1 did not agree on the checkpoint and made no progress for 3600 s. Check the storage of "
    with pytest.raises(CheckpointError, match=says):
        exchange("early")
    assert SILENCE_S < store.now < SILENCE_S + 10
    late = HostAgreement(store, 1, 2, SILENCE_S, store.clock)
    with pytest.raises(CheckpointError, match=says):
        late.exchange("late")


def test_rank_0_that_stopped_is_named():
    store = Store()
    _, second = ranks_of(store, 2)
    with pytest.raises(CheckpointError, match="rank 0 did not agree on the checkpoint"):
        second.exchange("early")


def test_rank_0_that_collects_keeps_the_others_waiting():
    """Rank 0 has written its file; while it waits for others, its progress tells the rest that it is alive."""
    store, exchange = spread(16_000.0, writes=True)
    before = store.add("progress/0", 0)
    exchange("early")
    assert store.add("progress/0", 0) - before > 16_000 / host_agreement._BEAT_S / 2


def test_a_lost_store_is_the_loss_of_rank_0():
    class Lost(Store):
        def set(self, key, value):
            raise dist.DistNetworkError("Broken pipe")

    with pytest.raises(CheckpointError, match=r"rank 0 did not agree .*\(Broken pipe\)"):
        HostAgreement(Lost(), 3, 4, SILENCE_S).exchange(None)


def test_many_missing_ranks_are_shortened():
    first = HostAgreement(Store(), 0, 256, SILENCE_S)
    assert first._missing(range(16, 32)).startswith("ranks 16, 17, 18, 19, 20, 21, 22, 23 and 8 more did not agree")


def test_progress_reaches_the_store_now_and_then():
    """A rank writes hundreds of parts per second, and one process serves the store for all ranks."""
    store = Store()
    agreement = HostAgreement(store, 5, 8, SILENCE_S, store.clock)
    for tenth in range(1000):
        store.now = tenth / 10
        agreement.progress()
    assert store.counters == {"progress/5": 100 / host_agreement._BEAT_S}


def test_what_ranks_said_is_forgotten_in_the_next_agreement():
    store = Store()
    (only,) = ranks_of(store, 1)
    assert [only.exchange(value) for value in "abc"] == [["a"], ["b"], ["c"]]
    assert store.deleted == ["1/0", "2/0"]


def all_ranks(store, values):
    """Run each rank in its own thread over a torch store. Return what each was told."""
    told = {}

    def exchange(rank):
        agreement = HostAgreement(dist.PrefixStore("checkpoint", store), rank, len(values), SILENCE_S)
        try:
            told[rank] = [agreement.exchange(value[rank]) for value in (values, values[::-1])]
        except CheckpointError as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=exchange, args=(rank,)) for rank in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return told


def test_every_rank_gets_every_ranks_message():
    """This runs over torch's own store, with the values that ranks exchange about their files."""
    values = [("", (f"rank-{rank}", Manifest({"rank": rank}))) for rank in range(4)]
    told = all_ranks(dist.HashStore(), values)
    assert told == dict.fromkeys(range(4), [values, values[::-1]])


def test_the_problem_of_one_rank_is_all_ranks(monkeypatch):
    said = [("", 1), ("disk full", None), ("", 3)]
    monkeypatch.setattr(host_agreement, "process_agreement", lambda: type("All", (), {"exchange": lambda *_: said}))
    with pytest.raises(CheckpointError, match="^disk full$"):
        host_agreement.agree("", 1)
    said[1] = ("", 2)
    assert host_agreement.agree("", 1) == [1, 2, 3]


def test_a_rank_that_agrees_is_seen_to_wait():
    """The hang detector recognizes it by the line of code that it is in."""
    seen = []

    class Asked(Store):
        def wait(self, keys, limit):
            seen.append(signs.place(sys._getframe(1)))
            super().wait(keys, limit)

    with pytest.raises(CheckpointError):
        HostAgreement(store := Asked(), 1, 2, SILENCE_S, store.clock).exchange(None)
    assert seen and all(place.startswith("waits in host_agreement.py:") for place in seen)


@pytest.mark.parametrize("error", [CheckpointError("damaged"), OSError("stale handle")])
def test_a_reader_that_fails_tells_all_ranks(monkeypatch, error):
    """Otherwise the others would go on to a collective without it."""
    said = []
    monkeypatch.setattr(restoring, "agree", lambda problem: said.append(problem))

    def fail():
        raise error

    with pytest.raises(type(error)):
        restoring._on_all_ranks(fail)
    assert restoring._on_all_ranks(lambda: 7) == 7
    assert said == [str(error), ""]


def test_no_rank_leaves_a_load_before_all_have_read(monkeypatch, tmp_path):
    """The next collective on the device times out after 1500 s, and a slow reader may take longer."""
    done = []
    monkeypatch.setattr(restoring, "agree", lambda problem: done.append("agreed"))
    for name in ("fill_weights", "fill_optimizer"):
        monkeypatch.setattr(restoring, name, lambda *_, name=name: done.append(name))
    files = SimpleNamespace(random={}, metadata={"rank-00000-of-00001.safetensors": {}})
    monkeypatch.setattr(restoring, "checked_files", lambda *_: files)
    restoring.load_training(tmp_path, SimpleNamespace(rank=0, world_size=1))
    assert done == ["agreed", "fill_weights", "fill_optimizer", "agreed"]
