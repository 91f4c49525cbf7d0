"""Bitwise comparison of the answers and traces of two runs."""

import torch

from verl_plugin.batch_invariance.comparison import Answer, Break, compare_log_probs, first_break
from verl_plugin.batch_invariance.situations import SITUATIONS, batch_of, make_prompts
from verl_plugin.batch_invariance.trace import Place, Seen, is_view, one_row_at_a_time

FIRST, SECOND = Place("layer", "aten.mm.default", 0, 0), Place("layer", "aten.add.Tensor", 0, 0)


def seen(order: int, value: float, *given: tuple[int, ...]) -> Seen:
    return Seen(order, torch.tensor([value]), given)


def test_log_probs_compared_up_to_the_first_other_token():
    alone = Answer((1, 2, 3), (-1.0, -2.0, -3.0))
    found = compare_log_probs(alone, Answer((1, 2, 4), (-1.0, -2.5, -9.0)))
    assert (found.compared, found.differ, found.largest) == (2, 1, 0.5)
    assert compare_log_probs(alone, alone).differ == 0


def test_first_operator_in_the_order_of_calls_is_the_break():
    """The later token differs in an earlier operator, and the first token's difference in attention follows from it."""
    alone = {0: {FIRST: seen(1, 1.0, (1, 4)), SECOND: seen(2, 1.0)}, 1: {FIRST: seen(1, 1.0, (1, 4))}}
    beside = {0: {FIRST: seen(1, 1.0, (8, 4)), SECOND: seen(2, 5.0)}, 1: {FIRST: seen(1, 2.0, (8, 4))}}
    expected = Break("aten.mm.default", "layer", 1, ((1, 4),), ((8, 4),))
    assert first_break(alone, beside, prompt=2, same=0) == expected
    assert first_break(alone, beside, prompt=1, same=0).operator == "aten.add.Tensor", "later tokens have other inputs"
    assert first_break(alone, alone, prompt=2, same=0) is None


def test_values_that_are_no_number_are_the_same_bits():
    nan = {0: {FIRST: seen(1, float("nan"))}}
    assert first_break(nan, {0: {FIRST: seen(1, float("nan"))}}, 1, 0) is None
    assert first_break(nan, {0: {FIRST: seen(1, 1.0)}}, 1, 0) is not None
    zero = {0: {FIRST: seen(1, 0.0)}}
    assert first_break(zero, {0: {FIRST: seen(1, -0.0)}}, 1, 0) is not None


def test_views_compute_nothing():
    assert is_view(torch.ops.aten.t.default) and not is_view(torch.ops.aten.mm.default)
    assert not is_view(torch.ops.aten.add_.Tensor)


def test_rows_are_put_together_again():
    rows, weight = torch.randn(5, 8), torch.randn(3, 8)
    found = one_row_at_a_time(torch.ops.aten.linear.default, (rows, weight), {})
    torch.testing.assert_close(found, rows @ weight.t())


def test_sample_is_at_its_place_in_every_batch():
    prompts = make_prompts(256, 150)
    for situation in SITUATIONS:
        batch, place = batch_of(situation, prompts)
        assert batch[place] == prompts.sample and len(batch) == 1 + situation.before + situation.behind
        assert batch.count(prompts.sample) == 1
