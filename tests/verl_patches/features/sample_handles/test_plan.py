"""Exchange plans compared with a naive distribution of samples, and what the driver packs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.features.sample_handles.handles import packed, unpacked
from verl_patches.features.sample_handles.plan import Generation, SampleHandleError, owners, plan_exchange


@st.composite
def batches(draw):
    """Draw generations of random sizes, some or all of their samples in any order, and the replica of every rank."""
    replicas, ranks_each = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ranks = replicas * ranks_each
    shares = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    generations, first = [], draw(st.integers(0, 1000))
    for share in shares:
        generations.append(Generation(first, share, ranks))
        first += share * ranks + draw(st.integers(0, 5))
    ids = [each.first + n for each in generations for n in range(each.share * ranks)]
    order = draw(st.permutations(ids))
    order = order[: len(order) // replicas * replicas] if draw(st.booleans()) else order[:replicas]
    replica_of_rank = draw(st.permutations([rank % replicas for rank in range(ranks)]))
    return generations, np.array(order), list(replica_of_rank)


def held(generations, rank):
    """Return the ids that a rank generated, in the order of its rows."""
    return [each.first + rank * each.share + n for each in generations for n in range(each.share)]


@settings(max_examples=300)
@given(batches())
def test_every_rank_gets_its_part_in_the_order_of_the_batch(drawn):
    generations, order, replica_of_rank = drawn
    ranks = range(len(replica_of_rank))
    plans = [plan_exchange(order, generations, replica_of_rank, rank) for rank in ranks]
    for receiver in ranks:
        arrived = [held(generations, sender)[row] for sender in ranks for row in plans[sender].sent[receiver]]
        parts = np.split(order, max(replica_of_rank) + 1)
        assert [arrived[place] for place in plans[receiver].place] == parts[replica_of_rank[receiver]].tolist()
        assert plans[receiver].received.tolist() == [len(plans[sender].sent[receiver]) for sender in ranks]


def test_the_example_of_the_module():
    generations, order = [Generation(100, 2, 4)], np.array([103, 100, 106, 101, 102, 107, 104, 105])
    of_rank_1 = plan_exchange(order, generations, [0, 0, 1, 1], 1)
    assert [rows.tolist() for rows in of_rank_1.sent] == [[1], [1], [0], [0]]
    of_rank_0 = plan_exchange(order, generations, [0, 0, 1, 1], 0)
    assert of_rank_0.received.tolist() == [2, 1, 0, 1] and of_rank_0.place.tolist() == [2, 0, 3, 1]


@pytest.mark.parametrize(
    ("ids", "generations", "sentence"),
    [
        ([3, 8], [Generation(0, 2, 4)], "no worker has sample 8; there are 0 to 7"),
        ([3, 9], [Generation(0, 1, 4), Generation(10, 1, 4)], "no worker has sample 9; there are 0 to 3, 10 to 13"),
        ([-1], [Generation(0, 1, 4)], "no worker has sample -1"),
        ([0], [], "no worker has sample 0; there are none"),
    ],
)
def test_missing_sample_is_named(ids, generations, sentence):
    with pytest.raises(SampleHandleError, match=sentence):
        owners(np.array(ids), generations)


def counted(lengths, width):
    return torch.arange(width)[None] < torch.tensor(lengths)[:, None]


def test_advantages_of_whole_answers_are_one_number_each():
    mask = counted([3, 1, 0], 3)
    column = packed(torch.tensor([[0.5, 0.5, 0.5], [-2.0, 0.0, 7.0], [9.0, 9.0, 1.0]]), mask)
    assert column.tolist() == [0.5, -2.0, 0.0]
    assert unpacked(column, mask).tolist() == [[0.5, 0.5, 0.5], [-2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@settings(max_examples=100)
@given(st.data())
def test_a_column_comes_back_where_it_counts(data):
    rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    lengths = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    few = st.sampled_from([0.0, 1.5, -3.0, float("nan")])
    values = torch.tensor(
        data.draw(st.lists(st.lists(few, min_size=width, max_size=width), min_size=rows, max_size=rows))
    )
    mask = counted(lengths, width)
    column = packed(values, mask)
    if not isinstance(column, torch.Tensor):
        assert [len(row) for row in column] == lengths
    torch.testing.assert_close(unpacked(column, mask), values.masked_fill(~mask, 0.0), rtol=0, atol=0, equal_nan=True)
