"""report.html and report.png take their colours from one module."""

import re
from pathlib import Path

from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from post_training.report import LoggedStep
from post_training.report.palette import DARK_FRAME, LIGHT, LIGHT_FRAME, STAGE_COLOURS
from post_training.report.picture import draw
from post_training.report.run_page import render_page
from tests.post_training.report.test_run_page import write_run

ROOT = Path(__file__).resolve().parents[3]
COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b|#[0-9a-fA-F]{3}\b")


def test_no_other_module_names_a_colour():
    places = [*(ROOT / "post_training").rglob("*.py"), *(ROOT / "post_training").rglob("*.html")]
    naming = {place.name for place in places if COLOUR.search(place.read_text())}
    assert naming == {"palette.py"}


def test_page_has_the_palette_in_light_and_dark(tmp_path):
    page = render_page(write_run(tmp_path / "run"))
    light, dark = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    for frame, text in ((LIGHT_FRAME, light), (DARK_FRAME, dark)):
        assert frame.items() <= dict(re.findall(r"--(\w+): (#\w+);", text)).items()
    assert set(LIGHT_FRAME) == set(DARK_FRAME) == set(re.findall(r"var\(--([a-z]+)\)", page))


def test_picture_has_the_colours_of_the_light_page(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: seen.append(colours_of(figure)))
    step = {"critic/score/mean": 0.5, "timing_s/gen": 1.0, "timing_s/step": 3.0}
    draw([LoggedStep(1, 100.0, step)], "A run", tmp_path / "report.png")
    (found,) = seen
    stages = {LIGHT[STAGE_COLOURS[name]] for name in ("rollout", "other")}
    assert found == {*(LIGHT_FRAME[name] for name in ("ground", "ink", "faint", "rule")), LIGHT[0], *stages}


def colours_of(figure: Figure) -> set[str]:
    rewards, times = figure.axes
    found = {figure.get_facecolor(), figure._suptitle.get_color()}
    for axes in (rewards, times):
        tick = axes.yaxis.get_major_ticks()[0]
        found |= {axes.get_facecolor(), axes.spines["left"].get_edgecolor(), axes.yaxis.label.get_color()}
        found |= {tick.gridline.get_color(), tick.label1.get_color(), tick.tick1line.get_color()}
        found |= {text.get_color() for text in axes.get_legend().get_texts()}
    found |= {line.get_color() for line in rewards.lines} | {bar.get_facecolor() for bar in times.patches}
    return {to_hex(colour) for colour in found}
