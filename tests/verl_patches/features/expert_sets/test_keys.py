"""Keys of token prefixes and hashes of expert sets, checked against dictionaries of the actual prefixes and sets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_patches.features.expert_sets.keys import PrefixKey, drawn, layer_keys, prefix_keys, set_hashes

TOKENS = st.lists(st.integers(0, 129_279), min_size=1, max_size=40)


@given(sequence=TOKENS, cuts=st.lists(st.integers(0, 40), max_size=4))
def test_keys_do_not_depend_on_how_tokens_arrive(sequence, cuts):
    prefix, edges = PrefixKey(), sorted({0, *(min(cut, len(sequence)) for cut in cuts), len(sequence)})
    arrived = [
        key for first, last in zip(edges, edges[1:], strict=False) for key in prefix.advance(sequence[first:last])
    ]
    assert arrived == prefix_keys(np.array(sequence)).tolist()
    assert prefix.count == len(sequence)


@given(sequences=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=2, max_size=20))
def test_keys_are_equal_for_equal_prefixes_alone(sequences):
    by_prefix: dict[tuple[int, ...], set[int]] = {}
    for sequence in sequences:
        for end, key in enumerate(prefix_keys(np.array(sequence)).tolist(), 1):
            by_prefix.setdefault(tuple(sequence[:end]), set()).add(key)
    assert all(len(keys) == 1 for keys in by_prefix.values())
    assert len(set.union(*by_prefix.values())) == len(by_prefix)


def test_layers_of_one_token_have_keys_of_their_own():
    keys = prefix_keys(np.arange(100))
    assert len(np.unique(np.concatenate([layer_keys(keys, layer) for layer in range(61)]))) == 6100


@pytest.mark.parametrize("share", [0.001, 0.25, 1.0])
def test_share_of_tokens_is_drawn(share):
    keys = prefix_keys(np.random.default_rng(0).integers(0, 129_280, 200_000))
    assert drawn(keys, share).mean() == pytest.approx(share, rel=0.2)
    assert share < 1 or drawn(np.array([0, 2**64 - 1], np.uint64), share).all()


def test_set_hash_ignores_order_and_notices_one_other_expert():
    drawn_experts = np.random.default_rng(1)
    rows = np.stack([drawn_experts.permutation(256)[:8] for _ in range(2000)])
    shuffled = np.stack([drawn_experts.permutation(row) for row in rows])
    assert (set_hashes(rows) == set_hashes(shuffled)).all()
    other = rows.copy()
    other[:, 3] = (other[:, 3] + 1) % 256
    changed = [set(mine) != set(theirs) for mine, theirs in zip(rows, other, strict=True)]
    assert ((set_hashes(rows) != set_hashes(other)) == changed).all() and any(changed)
