"""Charts hold every value where it belongs, whatever the values are."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from post_training.report import charts
from post_training.report.charts import Series
from tests.html_pages import StrictPage

# Seconds, bytes, rewards: what lies nearer to 0 than any of them is 0.
FINITE = st.floats(-1e12, 1e12, allow_nan=False).map(lambda value: value if abs(value) > 1e-12 else 0.0)


def points_of(chart: str) -> list[tuple[float, float]]:
    (path,) = re.findall(r'polyline class="c0 line" points="([^"]*)"', chart)
    return [tuple(map(float, pair.split(","))) for pair in path.split()]


@given(st.lists(FINITE, min_size=2, max_size=40), st.booleans())
def test_a_line_stays_inside_and_keeps_the_order_of_its_values(values, zero):
    chart = charts.lines([Series("a", list(enumerate(values, start=3)))], zero=zero)
    StrictPage(f"<!doctype html>{chart}")
    places = points_of(chart)
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert all(0 <= x <= 560 and 0 <= y <= 230 for x, y in places)
    heights = [-y for _, y in places]
    for (a, b), (p, q) in zip(
        zip(values, values[1:], strict=False), zip(heights, heights[1:], strict=False), strict=True
    ):
        assert (a <= b and p <= q + 0.11) or (a >= b and q <= p + 0.11)


@given(FINITE, FINITE)
def test_ticks_enclose_the_values_at_equal_distances(first, second):
    low, high = sorted((first, second))
    ticks = charts._scale(low, high)
    slack = 1e-6 * max(abs(low), abs(high), 1e-300)
    assert ticks[0] <= low + slack and ticks[-1] >= high - slack and 2 <= len(ticks) <= 8
    distances = [b - a for a, b in zip(ticks, ticks[1:], strict=False)]
    assert min(distances) > 0 and max(distances) == pytest.approx(min(distances), rel=1e-3)


def test_an_outlier_in_many_steps_is_drawn_and_the_drawing_stays_small():
    values = [0.0] * 20_000
    values[12_345] = 1.0
    chart = charts.lines([Series("a", list(enumerate(values)))])
    places = points_of(chart)
    assert len(places) <= 1000 and len(chart) < 100_000
    assert min(y for _, y in places) < max(y for _, y in places) - 100


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show():
    chart = charts.lines([Series("a", [(1, 0.0), (2, 1e-4), (3, 1.0)])], logarithmic=True)
    (low_x, low_y), (high_x, high_y) = points_of(chart)
    assert low_x < high_x and low_y > high_y
    assert charts.lines([Series("a", [(1, 0.0)])], logarithmic=True) == ""


def test_stacked_bars_add_up():
    chart = charts.stacked([1, 2], [("a", [1.0, 0.0]), ("b", [3.0, 4.0])])
    heights = [float(each) for each in re.findall(r'bar"[^>]*height="([^"]*)"', chart)]
    assert heights[0] * 3 == pytest.approx(heights[1], abs=0.3) and heights[2] == pytest.approx(
        sum(heights[:2]), abs=0.2
    )
    assert "sum: 4" in chart and charts.stacked([], []) == ""
    means = charts.stacked(list(range(400)), [("a", [1.0] * 400)])
    assert means.count('class="c0 bar"') == 134


def test_names_and_texts_are_escaped():
    for chart in (
        charts.lines([Series("<b>", [(1, 1.0), (2, 2.0)])]),
        charts.stacked([1], [("<b>", [1.0])]),
        charts.bars([("<b>", 1.0)]),
    ):
        assert "<b>" not in chart and "&lt;b&gt;" in chart


def test_numbers_and_sizes_are_short():
    assert [charts.number(each) for each in (0, 0.5, 12345.678, 2e-7)] == ["0", "0.5", "1.235e+04", "2.00e-07"]
    assert [charts.size(each) for each in (0, 1536, 3 * 2**40, 2**60)] == ["0 B", "1.5 KiB", "3 TiB", "1.049e+06 TiB"]
