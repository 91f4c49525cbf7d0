"""A sleeping vLLM worker keeps the used blocks of the weight pool, except those that an update fully rewrites."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch_npu  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st

from verl_plugin.alltoallv import sleep
from verl_plugin.alltoallv.sleep import Block, DiscardingSleep, blocks_to_keep

POOL = [Block(1 << 20, 1 << 12), Block(1 << 21, 1 << 12)]


class At(torch.Tensor):
    """A tensor that reports another address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def tensor_at(address: int, elements: int) -> torch.Tensor:
    made = torch.zeros(elements, dtype=torch.uint8).as_subclass(At)
    made.address = address
    return made


def segment(address: int, blocks: list[tuple[int, int, str]]) -> dict:
    """Make a segment of consecutive blocks, given as (size, requested size, state)."""
    listed, position = [], address
    for size, requested, state in blocks:
        listed.append({"address": position, "size": size, "requested_size": requested, "state": state})
        position += size
    return {"address": address, "blocks": listed}


def test_a_block_that_an_update_fills_is_given_up():
    snapshot = [segment(1 << 20, [(512, 500, "active_allocated"), (512, 512, "active_allocated")])]
    kept = blocks_to_keep(POOL, snapshot, [tensor_at(1 << 20, 500)])
    assert kept == [Block((1 << 20) + 512, 512)]


def test_a_block_that_an_update_fills_in_part_is_kept():
    snapshot = [segment(1 << 20, [(512, 500, "active_allocated")])]
    assert blocks_to_keep(POOL, snapshot, [tensor_at(1 << 20, 499)]) == [Block(1 << 20, 512)]
    assert blocks_to_keep(POOL, snapshot, [tensor_at((1 << 20) + 4, 496)]) == [Block(1 << 20, 512)]


def test_what_fills_its_memory_in_another_order_counts_and_what_leaves_holes_does_not():
    snapshot = [segment(1 << 20, [(512, 12, "active_allocated")])]
    turned = tensor_at(1 << 20, 12).view(3, 4).t().as_subclass(At)
    holes = tensor_at(1 << 20, 24).view(12, 2)[:, 0].as_subclass(At)
    turned.address = holes.address = 1 << 20
    assert not turned.is_contiguous()
    assert blocks_to_keep(POOL, snapshot, [turned]) == []
    assert blocks_to_keep(POOL, snapshot, [holes]) == [Block(1 << 20, 512)]


def test_memory_outside_of_the_pool_stays_where_it_is():
    snapshot = [segment(1 << 22, [(512, 512, "active_allocated")])]
    assert blocks_to_keep(POOL, snapshot, []) == []


@given(
    st.lists(
        st.tuples(
            st.integers(1, 8), st.sampled_from(["inactive", "active_allocated", "active_pending_free"]), st.booleans()
        ),
        max_size=8,
    )
)
def test_kept_and_given_up_are_all_that_is_in_use(drawn):
    blocks = [(64 * units, 64 * units - 3, state) for units, state, _ in drawn]
    snapshot = [segment(1 << 21, blocks)]
    listed = snapshot[0]["blocks"]
    written = {each["address"] for each, (_, _, whole) in zip(listed, drawn, strict=True) if whole}
    tensors = [tensor_at(each["address"], each["requested_size"]) for each in listed if each["address"] in written]
    expected = [
        Block(each["address"], each["size"])
        for each in listed
        if each["state"] != "inactive" and each["address"] not in written
    ]
    assert blocks_to_keep(POOL, snapshot, tensors) == expected


@given(st.data())
def test_kept_blocks_are_those_of_a_naive_reading(data):
    """Draw segments within pools, at their ends and outside, and tensors at any block, several at one, in any order."""
    pools = [Block(1 << 12, 512), Block(1 << 13, 64)]
    places = st.sampled_from([(1 << 12) - 64, 1 << 12, (1 << 12) + 64, (1 << 12) + 448, (1 << 12) + 512, 1 << 13])
    states = st.sampled_from(["inactive", "active_allocated"])
    drawn = data.draw(st.dictionaries(places, st.lists(states, min_size=1, max_size=3), max_size=4))
    snapshot = [segment(begin, [(16, 13, state) for state in blocks]) for begin, blocks in drawn.items()]
    listed = [block for each in snapshot for block in each["blocks"]]
    sizes = data.draw(st.lists(st.tuples(st.sampled_from(range(len(listed) + 1)), st.sampled_from([5, 12, 13, 16]))))
    tensors = [tensor_at(listed[number]["address"], size) for number, size in sizes if number < len(listed)]
    expected = []
    for each in snapshot:
        within = any(pool.address <= each["address"] < pool.address + pool.size for pool in pools)
        for block in each["blocks"]:
            filled = any(t.data_ptr() == block["address"] and t.numel() >= 13 for t in tensors)
            if within and block["state"] != "inactive" and not filled:
                expected.append(Block(block["address"], 16))
    assert blocks_to_keep(pools, snapshot, tensors) == expected


class Device:
    """A fake device whose memory is lost in sleep; records bytes by address, copies and calls."""

    def __init__(self, monkeypatch) -> None:
        self.bytes: dict[int, bytes] = {}
        self.slept: list[int] = []
        self.woken: list[list[str] | None] = []
        self.blocks: list[Block] = []
        self.host: dict[int, bytes] = {}
        self.fails = False
        camem = SimpleNamespace(memcpy=self.copy)
        monkeypatch.setitem(sys.modules, "vllm_ascend.device_allocator.camem", camem)
        monkeypatch.setattr(sleep, "_pool", list)
        monkeypatch.setattr(sleep, "blocks_to_keep", lambda *_: list(self.blocks))
        monkeypatch.setattr(torch.npu, "memory_snapshot", list)
        monkeypatch.setattr(torch.npu, "synchronize", lambda: None)

    def copy(self, to: int, room: int, of: int, size: int, direction: int) -> int:
        assert room == size
        if direction == sleep._TO_HOST:
            self.host[to] = self.bytes[of][:size]
        else:
            self.bytes[to] = self.host[of]
        return int(self.fails)

    def sleep(self, level: int = 1) -> None:
        self.slept.append(level)
        if level == 2:
            self.bytes = {address: b"?" * len(content) for address, content in self.bytes.items()}

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.woken.append(tags)


@pytest.fixture
def device(monkeypatch) -> Device:
    return Device(monkeypatch)


def sleeper_of(
    device: Device, written: list[torch.Tensor] | None
) -> tuple[DiscardingSleep, SimpleNamespace, list[int]]:
    discarded: list[int] = []
    worker = SimpleNamespace(sleep=device.sleep, wake_up=device.wake_up)
    return DiscardingSleep(worker, lambda: written, lambda: discarded.append(1)), worker, discarded


def test_every_kept_block_comes_back_where_it_was(device):
    """Sleep and wake twice with blocks of several sizes, more of them the second time; the rewritten one is lost."""
    sleeper, worker, discarded = sleeper_of(device, [])
    for sizes in ([3, 50, 7], [64, 1, 2, 90]):
        device.bytes = {1000 * place + 8: bytes([place + 1]) * size for place, size in enumerate(sizes)}
        before = dict(device.bytes)
        device.blocks = [Block(address, len(content)) for address, content in before.items()][1:]
        worker.sleep()
        assert sleeper.kept_bytes == sum(sizes[1:]) and len(set(device.host)) >= len(sizes) - 1
        worker.wake_up(tags=["kv_cache"])
        assert sleeper.kept_bytes, "weights still sleep"
        worker.wake_up(tags=["weights"])
        assert sleeper.kept_bytes == 0
        gone = next(iter(before))
        assert device.bytes == before | {gone: b"?" * len(before[gone])}
        device.host.clear()
    assert device.slept == [2, 2] and device.woken == [["kv_cache"], ["weights"]] * 2 and len(discarded) == 2


def test_worker_sleeps_as_upstream_without_a_known_update(device):
    _, worker, discarded = sleeper_of(device, None)
    worker.sleep(level=1)
    assert (device.slept, discarded) == ([1], [])
    device.blocks, device.bytes = [Block(8, 4)], {8: b"abcd"}
    sleeper, worker, discarded = sleeper_of(device, [])
    worker.sleep()
    worker.sleep(level=1)  # verl calls it a second time
    assert (device.slept[1:], len(discarded)) == ([2, 1], 1)
    worker.wake_up()
    assert device.bytes == {8: b"abcd"} and sleeper.kept_bytes == 0


def test_copy_that_fails_is_an_error(device):
    device.blocks, device.bytes, device.fails = [Block(8, 4)], {8: b"abcd"}, True
    _, worker, _ = sleeper_of(device, [])
    with pytest.raises(RuntimeError, match="could not copy 4 bytes .*Set .*discard_on_sleep to false"):
        worker.sleep()
    assert device.slept == []
