"""Charts as inline SVG: lines over steps, stacked bars over steps, and horizontal bars.

Colours are classes of the page's style sheet (c0, c1, ...), so a chart follows a dark page. Each step shows its values
in a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from markupsafe import Markup

_WIDTH, _HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 10, 10, 28
# More steps than this are drawn as the lowest and the highest value of each of several equal groups of steps.
_MOST_POINTS = 500
_MOST_COLUMNS = 160
_MOST_COLOURS = 8
# Values that are closer together than this are drawn as a flat line, whose axis begins at 0.
_FLAT, _SMALLEST = 1e-9, 1e-300
Text = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """Finite values over steps, in the order of steps; `dots` draws each value as a dot, without a line."""

    name: str
    points: Sequence[tuple[int, float]]
    dots: bool = False


def number(value: float) -> str:
    """Format a number with at most four significant digits."""
    return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


def size(value: float) -> str:
    """Format bytes for people: 1536 is 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.4g} {unit}"
        value /= 1024
    raise AssertionError


def lines(
    series: Sequence[Series], text: Text = number, logarithmic: bool = False, zero: bool = False, over: str = "step"
) -> Markup:
    """Draw lines over steps; empty if no series has a point.

    Args:
        series: the lines.
        text: formats a value.
        logarithmic: use a logarithmic value axis; values of 0 and below are left out.
        zero: begin the value axis at 0.
        over: name of the horizontal axis, if it is not the step.
    """
    if logarithmic:
        series = [Series(each.name, [(s, v) for s, v in each.points if v > 0], each.dots) for each in series]
    series = [each for each in series if each.points]
    if not series:
        return Markup("")
    steps = [step for each in series for step, _ in each.points]
    values = [value for each in series for _, value in each.points] + ([0.0] if zero else [])
    axes = _Axes(min(steps), max(steps), _scale(min(values), max(values), logarithmic, text is size), logarithmic)
    parts = [*axes.frame(text)]
    for index, each in enumerate(series):
        colour = f"c{index % _MOST_COLOURS}"
        places = [axes.place(*point) for point in _thinned(each.points)]
        if each.dots or len(places) == 1:
            parts += [f'<circle class="{colour} dot" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline class="{colour} line" points="{path}"/>')
    known = [dict(each.points) for each in series]
    rows = {
        step: [f"{each.name}: {text(at[step])}" for each, at in zip(series, known, strict=True) if step in at]
        for step in sorted(set(steps))
    }
    parts += axes.tooltips(rows, over)
    return _svg(parts, [each.name for each in series])


def stacked(
    steps: Sequence[int],
    parts: Sequence[tuple[str, Sequence[float]]],
    text: Text = number,
    colours: Mapping[str, int] | None = None,
) -> Markup:
    """Draw stacked bars over steps; empty if there are no steps.

    With many steps each bar is the mean of a group of steps; all groups have the same size.

    Args:
        steps: numbers of the steps.
        parts: names, each with a value of 0 or more for every step.
        text: formats a value.
        colours: number of each part's colour; by default colours are used in turn.
    """
    if not steps:
        return Markup("")
    width = math.ceil(len(steps) / _MOST_COLUMNS)
    groups = [range(begin, min(begin + width, len(steps))) for begin in range(0, len(steps), width)]
    means = [[sum(values[i] for i in group) / len(group) for _, values in parts] for group in groups]
    axes = _Axes(steps[0], steps[-1], _scale(0.0, max(map(sum, means))), margin=0.5 * width)
    shapes = [*axes.frame(text)]
    rows: dict[int, list[str]] = {}
    classes = [colours[name] if colours else index % _MOST_COLOURS for index, (name, _) in enumerate(parts)]
    for group, heights in zip(groups, means, strict=True):
        first, last, base = steps[group[0]], steps[group[-1]], 0.0
        left, right = axes.place(first - 0.44, 0)[0], axes.place(last + 0.44, 0)[0]
        for colour, height in zip(classes, heights, strict=True):
            top, bottom = axes.place(first, base + height)[1], axes.place(first, base)[1]
            if height > 0:
                shapes.append(
                    f'<rect class="c{colour} bar" x="{left:.1f}" y="{top:.1f}" '
                    f'width="{right - left:.1f}" height="{bottom - top:.1f}"/>'
                )
            base += height
        named = zip(parts, heights, strict=True)
        rows[first] = [f"{name}: {text(height)}" for (name, _), height in named if height > 0] + [f"sum: {text(base)}"]
    shapes += axes.tooltips(rows, "step")
    return _svg(shapes, [name for name, _ in parts], colours=classes)


def bars(values: Sequence[tuple[str, float]], text: Text = number) -> Markup:
    """Draw horizontal bars with their names and values; values are 0 or more."""
    if not values:
        return Markup("")
    row, left, highest = 22, 150, max(value for _, value in values) or 1.0
    parts = []
    for index, (name, value) in enumerate(values):
        middle = row * index + row / 2
        width = (_WIDTH - left - 90) * value / highest
        parts += [
            f'<text class="tick" x="{left - 8}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="c0 bar" x="{left}" y="{middle - 7}" width="{width:.1f}" height="14"/>',
            f'<text class="tick" x="{left + width + 6:.1f}" y="{middle + 4}">{escape(text(value))}</text>',
        ]
    return _svg(parts, [], row * len(values))


@dataclass(frozen=True)
class _Axes:
    """Maps steps and values to coordinates; `ticks` of the value axis include its lowest and highest value."""

    first: int
    last: int
    ticks: Sequence[float]
    logarithmic: bool = False
    margin: float = 0.0

    def place(self, step: float, value: float) -> tuple[float, float]:
        begin, span = self.first - self.margin, (self.last - self.first + 2 * self.margin) or 1
        low, high, at = self.ticks[0], self.ticks[-1], value
        if self.logarithmic:
            low, high, at = math.log10(low), math.log10(high), math.log10(value)
        across = 0.5 if self.first == self.last and not self.margin else (step - begin) / span
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * across
        return x, _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (at - low) / (high - low)

    def frame(self, text: Text) -> list[str]:
        """Draw grid lines and their labels."""
        shapes = []
        for tick in self.ticks:
            y = self.place(self.first, tick)[1]
            shapes.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            shapes.append(
                f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text(tick))}</text>'
            )
        whole = sorted({round(step) for step in _ticks(self.first, self.last, 8)} | {self.first})
        for step in whole:
            if self.first <= step <= self.last:
                x = self.place(step, self.ticks[0])[0]
                shapes.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{step}</text>')
        return shapes

    def tooltips(self, rows: dict[int, list[str]], over: str) -> list[str]:
        """Draw an invisible column over each step with a tooltip of its `rows`; `over` is the name of a step."""
        steps = list(rows)
        steps = steps[:: math.ceil(len(steps) / _MOST_COLUMNS)]
        centres = [self.place(step, self.ticks[-1])[0] for step in steps]
        edges = [_LEFT, *((left + right) / 2 for left, right in pairwise(centres)), _WIDTH - _RIGHT]
        shapes = []
        for step, (left, right) in zip(steps, pairwise(edges), strict=True):
            label = escape("\n".join([f"{over} {step}", *rows[step]]))
            place = f'x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{_HEIGHT - _TOP - _BOTTOM}"'
            shapes.append(f'<rect class="hit" {place}><title>{label}</title></rect>')
        return shapes


def _svg(
    parts: Sequence[str], legend: Sequence[str], height: int = _HEIGHT, colours: Sequence[int] | None = None
) -> Markup:
    colours = colours or [index % _MOST_COLOURS for index in range(len(legend))]
    keys = "".join(
        f'<span class="key"><i class="c{colour}"></i>{escape(name)}</span>'
        for colour, name in zip(colours, legend, strict=True)
    )
    drawing = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg>'
    return Markup(drawing + (f'<div class="legend">{keys}</div>' if keys else ""))


def _scale(low: float, high: float, logarithmic: bool = False, in_bytes: bool = False) -> list[float]:
    """Return two or more ticks from at most `low` to at least `high`."""
    if in_bytes and high >= 1024:
        unit = 1024.0 ** math.floor(math.log(high, 1024))
        return [tick * unit for tick in _scale(low / unit, high / unit)]
    if logarithmic:
        bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
        stride = math.ceil(max(1, top - bottom) / 6)
        return [10.0**power for power in range(bottom, max(top, bottom + 1) + stride, stride)]
    if high - low <= max(_FLAT * max(abs(low), abs(high)), _SMALLEST):
        low, high = (min(low, 0.0), max(high, 0.0)) if max(abs(low), abs(high)) > _SMALLEST else (0.0, 1.0)
    return _ticks(low, high, 5)


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers that enclose `low` and `high`, at equal distances of 1, 2 or 5 times a power of ten."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    stride = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= most)
    begin, end = math.floor(low / stride + 1e-9), math.ceil(high / stride - 1e-9)
    return [index * stride for index in range(begin, max(end, begin + 1) + 1)]


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return few enough points to draw: the lowest and the highest of each group of points."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    width = math.ceil(2 * len(points) / _MOST_POINTS)
    chosen: list[tuple[int, float]] = []
    for begin in range(0, len(points), width):
        group = points[begin : begin + width]
        chosen += sorted({min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])})
    return chosen
