"""The first point at which two dumps diverge, on synthetic dumps with a known answer."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest
import torch

from post_training.mismatch import points
from post_training.mismatch.comparison import TOLERANCES, ComparisonError, Swap, Tolerance, compare
from post_training.mismatch.dumps import Captured, TokenSequence
from post_training.mismatch.points import in_order, in_words, of_layer, split
from post_training.mismatch.report import as_json, render_page, sentence, shown, table
from tests.html_pages import StrictPage
from tests.post_training.mismatch.synthetic import CHOSEN, EXPERTS, LAYERS, SEQUENCES, TOKENS, changed, dump

ROLLOUT, TRAINING = dump("rollout"), dump("training")
EVERY = in_order(set(TRAINING.points))
FIRST_ROWS = (0, len(SEQUENCES[0].tokens))


def first(rollout, training=TRAINING):
    found = compare(rollout, training).first
    return found and found.point


def test_points_are_in_the_order_of_a_forward():
    assert EVERY[0] == points.EMBEDDING and EVERY[-3:] == [points.FINAL_NORM, points.LOGITS, points.LOG_PROBS]
    assert EVERY[1 : 1 + len(points.OF_A_LAYER)] == [of_layer(0, part) for part in points.OF_A_LAYER]
    assert in_order({of_layer(10, points.MLP), of_layer(9, points.OUTPUT)})[0] == of_layer(9, points.OUTPUT)
    assert split("layers.12.mlp") == (12, "mlp") and in_words("layers.12.mlp_norm") == "layer 12, mlp norm"
    for wrong in ("layers.1.nothing", "layers.x.mlp", "mlp", "layers.1"):
        with pytest.raises(ValueError, match="not a point"):
            split(wrong)


def test_equal_dumps_agree_at_every_point():
    found = compare(ROLLOUT, TRAINING)
    assert found.first is None and [each.point for each in found.results] == EVERY
    assert all(each.worst == 0 and each.judged == each.tokens for each in found.results)
    assert "agree at all" in sentence(found) and not found.one_sided


@pytest.mark.parametrize("point", [each for each in EVERY if split(each)[1] != points.EXPERTS])
def test_one_changed_point_is_named_with_its_layer(point):
    other = changed(ROLLOUT, point, lambda values: values + 0.01)
    assert first(other) == point
    told = sentence(compare(other, TRAINING))
    assert in_words(point) in told and re.search(r": by [\d.e-]+ where [\d.e-]+ is allowed, at every token", told)
    # A difference as small as that between kernels does not count.
    assert first(changed(ROLLOUT, point, lambda values: values * (1 + 1e-6))) is None


def test_what_follows_from_the_first_is_not_named():
    other = ROLLOUT
    for point in EVERY[5:]:
        if split(point)[1] != points.EXPERTS:
            other = changed(other, point, lambda values: values * 1.5)
    assert first(other) == EVERY[5]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, "every token"),
        ([1, 2, 3, 4, 6, 7, 8, 9], "every token but the first of each sequence"),
        ([3, 4, 7, 8, 9], "every decoded token and no token of a prompt"),
        ([0, 1, 2, 5, 6], "every token of a prompt and no decoded one"),
        ([4], "1 of 10 tokens"),
    ],
)
def test_which_tokens_diverge_is_told(rows, words):
    found = compare(changed(ROLLOUT, of_layer(1, points.ATTENTION), lambda values: -values, rows), TRAINING).first
    assert (found.layer, found.where) == (1, words)


def test_the_worst_token_is_told():
    other = changed(ROLLOUT, points.FINAL_NORM, lambda values: values * 3, [7])
    assert compare(other, TRAINING).first.at == (1, 2)


def test_values_that_are_not_finite_diverge():
    found = compare(changed(ROLLOUT, points.EMBEDDING, lambda values: values * math.nan, [2]), TRAINING)
    assert found.first.point == points.EMBEDDING and math.isnan(found.first.worst)
    render_page([found], {})


def swap(given, layer, row, lost, gained):
    """Give one token of a layer another expert."""

    def change(values):
        return torch.where(values == lost, gained, values)

    return changed(given, of_layer(layer, points.EXPERTS), change, [row])


def unchosen(row, layer=0):
    chosen = TRAINING.points[of_layer(layer, points.EXPERTS)].values[row].tolist()
    return chosen[0], next(expert for expert in range(EXPERTS) if expert not in chosen)


def test_a_near_tie_is_told_and_what_follows_it_is_not_judged():
    lost, gained = unchosen(6)
    allowing = replace(TOLERANCES["float32"], swapped=0.2)
    other = swap(ROLLOUT, 0, 6, lost, gained)
    # The token's own output differs, and in later layers so do later tokens of its sequence.
    other = changed(other, of_layer(0, points.MLP), lambda values: values * 2, [6])
    other = changed(other, of_layer(1, points.ATTENTION), lambda values: values * 2, [6, 7, 9])
    found = compare(other, TRAINING, allowing)
    assert found.first is None and found.swapped == 1
    choice = found.result(of_layer(0, points.EXPERTS))
    assert choice.swaps == (Swap(lost, gained, 1),) and choice.worst == pytest.approx(1 / TOKENS)
    judged = {
        part: found.result(of_layer(layer, part)).judged for layer, part in ((0, points.MLP), (1, points.ATTENTION))
    }
    assert judged == {points.MLP: TOKENS - 1, points.ATTENTION: TOKENS - 4}
    # Earlier tokens of that sequence, and other sequences, are still judged.
    for row in (5, 0):
        again = changed(other, of_layer(1, points.ATTENTION), lambda values: values * 2, [row])
        assert compare(again, TRAINING, allowing).first.point == of_layer(1, points.ATTENTION)


def is_judged(swaps, point, row):
    """Return whether `compare` judges a row, by its documented rule.

    A token with other experts is not judged from that layer's MLP on, and in later layers neither are the later tokens
    of its sequence. `swaps` has pairs of (layer, row).
    """
    layer, part = split(point)
    begin = FIRST_ROWS[row >= FIRST_ROWS[1]]
    seen = layer if layer is not None else 0 if point == points.EMBEDDING else LAYERS
    own = part in points.OF_A_LAYER[points.OF_A_LAYER.index(points.EXPERTS) + 1 :] and (layer, row) in swaps
    return not own and not any(at < seen and begin <= swapped <= row for at, swapped in swaps)


@pytest.mark.parametrize("seed", range(20))
def test_tokens_behind_any_swap_are_not_judged(seed):
    draw = random.Random(seed)
    swaps = draw.sample([(layer, row) for layer in range(LAYERS) for row in range(TOKENS)], draw.randint(2, 4))
    other = ROLLOUT
    for layer, row in swaps:
        other = swap(other, layer, row, *unchosen(row, layer))
    for result in compare(other, TRAINING, Tolerance(1e-4, 1e-3, 1.0)).results:
        rows = TRAINING.points[result.point].rows.tolist()
        assert result.judged == sum(is_judged(swaps, result.point, row) for row in rows), result.point


def test_more_swaps_than_near_ties_are_a_fault():
    other = ROLLOUT
    for row in range(TOKENS):
        other = swap(other, 1, row, *unchosen(row, 1))
    found = compare(other, TRAINING).first
    assert (found.point, found.worst) == (of_layer(1, points.EXPERTS), 1.0)
    assert ": for 100% of the tokens where " in sentence(compare(other, TRAINING))
    assert "router" in sentence(compare(other, TRAINING))


def test_all_tokens_with_other_experts_reported():
    other = ROLLOUT
    for row in (0, 5):
        other = swap(other, 0, row, *unchosen(row))
    found = compare(other, TRAINING, Tolerance(1e-4, 1e-3, 0.5))
    assert found.first is None and found.result(of_layer(1, points.OUTPUT)).judged == 0
    assert "none is compared" in sentence(found)


def test_experts_that_explain_the_difference_are_named():
    chosen = TRAINING.points[of_layer(1, points.EXPERTS)].values
    for culprit in range(EXPERTS):
        rows = [row for row in range(TOKENS) if culprit in chosen[row]]
        if rows:
            other = changed(ROLLOUT, of_layer(1, points.MLP), lambda values: values + 1, rows)
            found = compare(other, TRAINING).first
            assert found.point == of_layer(1, points.MLP)
            # An expert with exactly the same tokens cannot be told apart.
            assert len(found.experts) == 1
            assert [row for row in range(TOKENS) if found.experts[0] in chosen[row]] == rows
            assert str(found.experts[0]) in sentence(compare(other, TRAINING))


def test_no_expert_is_blamed_for_a_difference_at_every_token():
    found = compare(changed(ROLLOUT, of_layer(1, points.MLP), lambda values: values + 1), TRAINING).first
    assert found.experts == () and CHOSEN


def test_tokens_that_only_one_side_has_are_left_out():
    half = ROLLOUT.points[points.EMBEDDING]
    other = replace(ROLLOUT, points={**ROLLOUT.points, points.EMBEDDING: Captured(half.rows[5:], half.values[5:])})
    found = compare(other, TRAINING)
    assert found.first is None and found.result(points.EMBEDDING).tokens == 5
    less = replace(ROLLOUT, points={point: other.points[point] for point in EVERY if point != of_layer(0, points.MLP)})
    assert compare(less, TRAINING).one_sided == (of_layer(0, points.MLP),)


def test_the_coarser_dtype_decides_the_tolerance():
    rounded = dump("rollout", "bfloat16")
    assert compare(rounded, TRAINING).dtype == "bfloat16"
    assert compare(rounded, TRAINING).tolerance == TOLERANCES["bfloat16"]


@pytest.mark.parametrize(
    ("dtype", "relative", "log_prob", "swapped"),
    [("float32", 1e-4, 1e-3, 0.01), ("float16", 0.01, 0.1, 0.3), ("bfloat16", 0.05, 0.5, 0.5)],
)
def test_each_dtype_has_its_tolerance_up_to_which_all_is_well(dtype, relative, log_prob, swapped):
    """docs/operations.md lists these tolerances."""
    other = replace(ROLLOUT, header=replace(ROLLOUT.header, dtype=dtype))
    found = compare(other, TRAINING)
    assert {each.tolerance for each in found.results if each.part == points.EXPERTS} == {swapped}
    assert {each.tolerance for each in found.results if each.part == points.LOG_PROBS} == {log_prob}
    assert {each.tolerance for each in found.results} == {relative, log_prob, swapped}
    for factor, point in ((0.99, None), (1.01, points.EMBEDDING)):
        scaled = changed(other, points.EMBEDDING, lambda values, factor=factor: values * (1 + relative * factor))
        assert first(scaled) == point
        moved = changed(other, points.LOG_PROBS, lambda values, factor=factor: values + log_prob * factor)
        assert first(moved) == (point and points.LOG_PROBS)


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (dump("training"), "Pass one of each"),
        (replace(ROLLOUT, header=replace(ROLLOUT.header, layers=3)), "same model"),
        (replace(ROLLOUT, header=replace(ROLLOUT.header, dtype="float64")), "Known are"),
        (replace(ROLLOUT, sequences=ROLLOUT.sequences[:1]), "same tokens"),
        (
            replace(ROLLOUT, sequences=(TokenSequence((3, 4, 9), (6, 7)), ROLLOUT.sequences[1])),
            "sequence 1 has different",
        ),
        (changed(ROLLOUT, points.EMBEDDING, lambda values: values), None),
    ],
)
def test_dumps_that_cannot_be_compared_rejected(other, word):
    if word is None:
        compare(other, TRAINING)
        return
    with pytest.raises(ComparisonError, match=word):
        compare(other, TRAINING)


def test_json_page_and_table_say_the_same(tmp_path):
    other = swap(changed(ROLLOUT, of_layer(1, points.MLP), lambda values: values + 1), 0, 6, *unchosen(6))
    found = compare(other, TRAINING, Tolerance(1e-4, 1e-3, 0.5))
    said = as_json(found)
    assert said["first"] == of_layer(1, points.MLP) and len(said["results"]) == len(EVERY)
    assert [each["diverges"] for each in said["results"]] == [each.diverges for each in found.results]
    page = render_page([found, compare(ROLLOUT, TRAINING)], {"tokens": "<file>"})
    StrictPage(page)
    assert page.count("<svg") >= 2 and "layer 1, mlp" in page and "&lt;file&gt;" in page
    assert table(found).row_count == len(EVERY)


def test_table_shows_points_around_the_first_difference():
    many = {of_layer(layer, points.MLP): TRAINING.points[points.EMBEDDING] for layer in range(60)}
    given = replace(TRAINING, points=many)
    other = changed(replace(ROLLOUT, points=many), of_layer(30, points.MLP), lambda values: values + 1)
    found = compare(other, given)
    numbers = [number for number, _ in shown(found)]
    assert LAYERS and numbers == [*range(26, 35), *range(56, 60)] and table(found).row_count < 20
