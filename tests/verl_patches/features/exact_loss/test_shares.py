"""The weights of micro batches compared with one pass over the mini batch, by verl's own formulas in plain torch."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.features.exact_loss.shares import MODES, Amounts, count, share

# loss, mask [sequences, tokens] -> scalar, as verl documents each mode.
AGGREGATIONS = {
    "token-mean": lambda loss, mask: (loss * mask).sum() / mask.sum(),
    "seq-mean-token-sum": lambda loss, mask: (loss * mask).sum(-1).mean(),
    "seq-mean-token-mean": lambda loss, mask: ((loss * mask).sum(-1) / mask.sum(-1)).mean(),
    "seq-mean-token-sum-norm": lambda loss, mask: (loss * mask).sum() / mask.shape[-1],
}


def random_batch(seed, sequences, width=64):
    """Return a loss and a mask with lengths 1..width."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = torch.tensor([draw.randint(1, width) for _ in range(sequences)])
    mask = torch.arange(width) < lengths[:, None]
    return torch.randn(sequences, width, generator=generator, dtype=torch.float64), mask


def amounts(mask):
    return Amounts(*count(mask).tolist())


def averaged(mode, ranks, loss, mask, exact):
    """Average as Megatron does: the mean over ranks of the means over micro batches, which are lists of rows."""
    whole, total = amounts(mask), 0.0
    for batches in ranks:
        for rows in batches:
            upstream_weight = 1 / (len(ranks) * len(batches))
            factor = share(mode, amounts(mask[rows]), whole) / upstream_weight if exact else 1.0
            total += upstream_weight * factor * AGGREGATIONS[mode](loss[rows], mask[rows]).item()
    return total


def cut(draw, sequences, ranks):
    """Draw the rows of every rank's micro batches: any order, any sizes, no micro batch empty."""
    rows = list(range(sequences))
    draw.shuffle(rows)
    share_of_rank = sequences // ranks
    for rank in range(ranks):
        mine = rows[rank * share_of_rank : (rank + 1) * share_of_rank]
        edges = sorted(draw.sample(range(1, len(mine)), draw.randint(0, len(mine) - 1)))
        yield [mine[a:b] for a, b in zip([0, *edges], [*edges, len(mine)], strict=True)]


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), ranks=st.sampled_from([1, 2, 4]), mode=st.sampled_from(MODES))
def test_any_cut_gives_the_loss_of_one_pass(seed, ranks, mode):
    loss, mask = random_batch(seed, 16)
    batches = list(cut(random.Random(seed), 16, ranks))
    found = averaged(mode, batches, loss, mask, exact=True)
    assert found == pytest.approx(AGGREGATIONS[mode](loss, mask).item(), rel=1e-12, abs=1e-12)


def test_upstreams_average_is_another_loss():
    loss, mask = random_batch(0, 16)
    loss = loss[:, :1].expand(-1, mask.shape[1])  # as with one advantage for all tokens of a sequence
    batches = [[[row] for row in range(rank, 16, 2)] for rank in range(2)]
    for mode, off in (("token-mean", True), ("seq-mean-token-sum", False), ("seq-mean-token-sum-norm", True)):
        expected = AGGREGATIONS[mode](loss, mask).item()
        found = averaged(mode, batches, loss, mask, exact=False)
        assert (abs(found - expected) > 1e-2 * abs(expected)) == off, mode


def test_the_example_of_the_docstring():
    whole = Amounts(2, 8, 2)
    assert [share("token-mean", Amounts(1, tokens, 1), whole) * 2 for tokens in (6, 2)] == [1.5, 0.5]


def test_one_micro_batch_of_one_rank_keeps_its_bits():
    _, mask = random_batch(3, 5)
    assert [share(mode, amounts(mask), amounts(mask)) for mode in MODES] == [1.0] * 4


def test_a_sequence_without_a_token_is_in_no_denominator():
    loss, mask = random_batch(4, 6)
    mask[2] = mask[3] = False
    kept = [0, 1, 4, 5]
    batches = [[[0, 1, 2]], [[3, 4, 5]]]
    for mode in ("token-mean", "seq-mean-token-sum"):
        expected = AGGREGATIONS[mode](loss[kept], mask[kept]).item()
        assert averaged(mode, batches, loss, mask, exact=True) == pytest.approx(expected, rel=1e-12)


def test_a_batch_without_a_token_weighs_nothing():
    nothing = amounts(torch.zeros(2, 3, dtype=torch.bool))
    assert [share(mode, nothing, nothing) for mode in MODES] == [0.0, 0.0, 0.0, 1.0]


def test_a_mode_that_verl_does_not_have_is_named():
    with pytest.raises(ValueError, match="loss_agg_mode=mean is invalid. Set it to one of token-mean, "):
        share("mean", Amounts(1, 1, 1), Amounts(1, 1, 1))
