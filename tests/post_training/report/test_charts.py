"""Charts place every value correctly, whatever the values are."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from post_training.plan.step_time import model as step_time
from post_training.report import charts
from post_training.report.charts import Series
from post_training.report.metrics import SPREAD_OVER_OTHERS, STAGES
from post_training.report.palette import DARK, LIGHT, STAGE_COLOURS, stage_colour
from tests.html_pages import StrictPage

# Seconds, bytes, rewards: anything closer to 0 than these can be counts as 0.
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


def test_logarithmic_axis_drops_nonpositive_values():
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


def grid(*ticks: tuple[str, str, str]) -> str:
    """Return an axis's grid lines and labels; each tick is (line y, label y, label)."""
    return "".join(
        f'<line class="grid" x1="78" x2="550" y1="{y}" y2="{y}"/>'
        f'<text class="tick" x="72" y="{beside}" text-anchor="end">{text}</text>'
        for y, beside, text in ticks
    )


def below(*steps: tuple[str, int]) -> str:
    return "".join(f'<text class="tick" x="{x}" y="222" text-anchor="middle">{step}</text>' for x, step in steps)


def told(*columns: tuple[str, str, str]) -> str:
    return "".join(
        f'<rect class="hit" x="{x}" y="10" width="{width}" height="192"><title>{text}</title></rect>'
        for x, width, text in columns
    )


def drawing(parts: str, *names: str, height: int = 230) -> str:
    keys = "".join(f'<span class="key"><i class="c{index}"></i>{name}</span>' for index, name in enumerate(names))
    legend = f'<div class="legend">{keys}</div>' if names else ""
    return f'<svg viewBox="0 0 560 {height}" role="img">{parts}</svg>{legend}'


FIFTHS = (
    ("202.0", "206.0"),
    ("163.6", "167.6"),
    ("125.2", "129.2"),
    ("86.8", "90.8"),
    ("48.4", "52.4"),
    ("10.0", "14.0"),
)


def test_lines_are_drawn_to_the_letter():
    """The plot spans x 78 to 550 and y 202 to 10; the two steps are at its ends, 0 at the bottom and 10 at the top."""
    axis = grid(*((*place, str(2 * index)) for index, place in enumerate(FIFTHS)))
    chart = charts.lines([Series("a<b", [(1, 0.0), (2, 10.0)]), Series("dot", [(2, 5.0)])])
    assert chart == drawing(
        axis + below(("78.0", 1), ("550.0", 2)) + '<polyline class="c0 line" points="78.0,202.0 550.0,10.0"/>'
        '<circle class="c1 dot" cx="550.0" cy="106.0" r="2.5"/>'
        + told(("78.0", "236.0", "step 1\na&lt;b: 0"), ("314.0", "236.0", "step 2\na&lt;b: 10\ndot: 5")),
        "a&lt;b",
        "dot",
    )
    dots = charts.lines([Series("a", [(1, 0.0), (2, 10.0)], dots=True)], over="k =")
    assert dots.count("<circle") == 2 and "polyline" not in dots and "<title>k = 1\na: 0</title>" in dots
    assert charts.lines([Series("a", [])]) == "" == charts.lines([Series("a", [(1, -1.0)])], logarithmic=True)


def test_a_logarithmic_axis_has_a_power_of_ten_at_each_line():
    chart = charts.lines([Series("a", [(1, 1.0), (2, 0.0), (3, 100.0)])], logarithmic=True)
    assert chart == drawing(
        grid(("202.0", "206.0", "1"), ("106.0", "110.0", "10"), ("10.0", "14.0", "100"))
        + below(("78.0", 1), ("314.0", 2), ("550.0", 3)) + '<polyline class="c0 line" points="78.0,202.0 550.0,10.0"/>'
        + told(("78.0", "236.0", "step 1\na: 1"), ("314.0", "236.0", "step 3\na: 100")),
        "a",
    )  # fmt: skip


def test_one_step_stands_in_the_middle():
    chart = charts.lines([Series("a", [(7, 5.0)])])
    assert '<circle class="c0 dot" cx="314.0" cy="10.0" r="2.5"/>' in chart and below(("314.0", 7)) in chart


def test_stacked_bars_are_drawn_to_the_letter():
    """A step takes half of the width of 472 and its bar 0.88 of that; the full value 3 is 192 high."""
    parts = [("x", [1.0, 3.0]), ("y", [1.0, 0.0])]
    axis = grid(("202.0", "206.0", "0"), ("138.0", "142.0", "1"), ("74.0", "78.0", "2"), ("10.0", "14.0", "3"))
    bars = [("c0", "92.2", "138.0", "64.0"), ("c1", "92.2", "74.0", "64.0"), ("c0", "328.2", "10.0", "192.0")]
    shapes = "".join(
        f'<rect class="{colour} bar" x="{x}" y="{y}" width="207.7" height="{height}"/>' for colour, x, y, height in bars
    )
    columns = told(("78.0", "236.0", "step 1\nx: 1\ny: 1\nsum: 2"), ("314.0", "236.0", "step 2\nx: 3\nsum: 3"))
    assert charts.stacked([1, 2], parts) == drawing(
        axis + below(("196.0", 1), ("432.0", 2)) + shapes + columns, "x", "y"
    )
    assert charts.stacked([], [("x", [])]) == ""


def test_bars_of_very_many_steps_are_means_of_equally_many():
    chart = charts.stacked(list(range(1, 322)), [("x", [float(step) for step in range(1, 322)])])
    titles = re.findall(r"<title>step (\d+)\nx: ([\d.]+)\n", chart)
    assert len(titles) == 107 and titles[:2] == [("1", "2"), ("4", "5")] and titles[-1] == ("319", "320")


def test_horizontal_bars_are_drawn_to_the_letter():
    """The longest bar is 320 wide, and each row is 22 high."""
    rows = [("all", "4", "11.0", "15.0", "4.0", "320.0", "476.0"), ("b", "1", "33.0", "37.0", "26.0", "80.0", "236.0")]
    shapes = "".join(
        f'<text class="tick" x="142" y="{beside}" text-anchor="end">{name}</text>'
        f'<rect class="c0 bar" x="150" y="{top}" width="{width}" height="14"/>'
        f'<text class="tick" x="{end}" y="{beside}">{value}</text>'
        for name, value, _, beside, top, width, end in rows
    )
    assert charts.bars([("all", 4.0), ("b", 1.0)]) == drawing(shapes, height=44)
    assert charts.bars([]) == "" and 'width="0.0"' in charts.bars([("nothing", 0.0)])


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.001, "0.001"), (0.00099, "9.90e-04"), (-12345.6, "-1.235e+04"), (99999, "1e+05"), (1e5, "1.00e+05")],
)
def test_numbers_are_short(value, shown):
    assert charts.number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (-1536, "-1.5 KiB"),
        (2**40, "1 TiB"),
        (2**52, "4096 TiB"),
        (2**30 - 1, "1024 MiB"),
    ],
)
def test_bytes_are_read_in_powers_of_1024(value, shown):
    assert charts.size(value) == shown


@pytest.mark.parametrize(
    ("low", "high", "options", "ticks"),
    [
        (5.0, 5.0, {}, [0, 1, 2, 3, 4, 5]),
        (-3.0, -3.0, {}, [-3, -2, -1, 0]),
        (0.0, 0.0, {}, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (1.0, 1000.0, {"logarithmic": True}, [1, 10, 100, 1000]),
        (2.0, 3.0, {"logarithmic": True}, [1, 10]),
        (1e-8, 1e6, {"logarithmic": True}, [1e-8, 1e-5, 1e-2, 10, 1e4, 1e7]),
        (0.0, 3 * 2**20, {"in_bytes": True}, [0, 2**20, 2 * 2**20, 3 * 2**20]),
        (0.0, 1000.0, {"in_bytes": True}, [0, 200, 400, 600, 800, 1000]),
        (0.0, 12.0, {}, [0, 5, 10, 15]),
    ],
)
def test_an_axis_has_round_numbers(low, high, options, ticks):
    assert charts._scale(low, high, **options) == pytest.approx(ticks, rel=1e-12, abs=1e-300)


def test_stage_has_one_colour_in_pages_and_pictures():
    """Colours do not depend on which stages a run has: `update` is c1 with or without a reference pass."""
    for names in (("rollout", "update"), ("rollout", "ref", "update")):
        chart = charts.stacked([1], [(name, [1.0]) for name in names], colours=STAGE_COLOURS)
        classes = re.findall(r'class="c(\d+) bar"', chart)
        assert [LIGHT[int(each)] for each in classes] == [stage_colour(name) for name in names]
    drawn = {name for name in (*STAGES, *step_time.STAGES) if name != SPREAD_OVER_OTHERS}
    assert len({STAGE_COLOURS[name] for name in drawn - {"offload"}}) == len(drawn - {"offload"})
    assert len(LIGHT) == len(DARK) > max(STAGE_COLOURS.values())


@pytest.mark.parametrize("zero, lowest", [(True, "0"), (False, "100")])
def test_axis_begins_at_0_where_it_is_to(zero, lowest):
    chart = charts.lines([Series("a", [(1, 100.0), (2, 101.0)])], zero=zero)
    assert re.search(r'text-anchor="end">([^<]*)<', chart)[1] == lowest


def test_zero_is_left_out_of_a_logarithmic_axis_alone():
    points = [(1, -1.0), (2, 0.0), (3, 1.0), (4, 10.0)]
    assert len(points_of(charts.lines([Series("a", points)]))) == 4
    assert len(points_of(charts.lines([Series("a", points)], logarithmic=True))) == 2


@pytest.mark.parametrize(
    "value, text",
    [(0, "0 B"), (1000, "1000 B"), (1023, "1023 B"), (1024, "1 KiB"), (-1536, "-1.5 KiB"), (1024**3, "1 GiB"),
     (3 * 1024**5, "3072 TiB")],
)  # fmt: skip
def test_sizes_are_counted_by_1024(value, text):
    assert charts.size(value) == text


def test_bars_of_many_steps_are_means_and_lie_on_each_other():
    """161 steps are drawn as 80 bars of two steps each, and one for the last step."""
    steps = range(1, 162)
    chart = charts.stacked(steps, [("a", [1.0] * 161), ("b", [3.0] * 161)])
    titles = re.findall("<title>([^<]*)</title>", chart)
    assert len(titles) == 81 and {title.partition("\n")[2] for title in titles} == {"a: 1\nb: 3\nsum: 4"}
    bars = re.findall(r'class="c(\d) bar" x="[^"]*" y="([^"]*)" width="[^"]*" height="([^"]*)"', chart)
    below = [(float(y), float(height)) for colour, y, height in bars if colour == "0"]
    above = [(float(y), float(height)) for colour, y, height in bars if colour == "1"]
    assert len(below) == len(above) == 81
    for (low, short), (high, tall) in zip(below, above, strict=True):
        assert high + tall == pytest.approx(low, abs=0.11) and tall == pytest.approx(3 * short, abs=0.3)
