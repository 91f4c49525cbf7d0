"""What a sleeping vLLM worker keeps: all that is in use in the pool of weights, but for what an update writes whole."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_plugin.alltoallv.sleep import Block, blocks_to_keep

POOL = [Block(1 << 20, 1 << 12), Block(1 << 21, 1 << 12)]


class At(torch.Tensor):
    """A tensor that says it lies at another address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def tensor_at(address: int, elements: int) -> torch.Tensor:
    made = torch.zeros(elements, dtype=torch.uint8).as_subclass(At)
    made.address = address
    return made


def segment(address: int, blocks: list[tuple[int, int, str]]) -> dict:
    """blocks: size, the part of it that was asked for, and state, one behind the other."""
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
