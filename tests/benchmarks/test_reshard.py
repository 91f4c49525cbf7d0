"""The reshard benchmark: its comparison, and one run of each method on eight emulated dies."""

import json
from pathlib import Path

import pytest

from benchmarks.reshard import COLUMNS, main, ratio, table

WAYS = {
    "planned": dict.fromkeys(COLUMNS, [1.0, 2.0, 9.0]),
    "verl": dict.fromkeys(COLUMNS, [4.0, 4.0, 4.0]),
    "published": dict.fromkeys(COLUMNS, [2.0, 2.0, 2.0]),
}


def test_a_ratio_is_the_median_over_repeats() -> None:
    assert ratio(WAYS, "wall_seconds", "verl") == 0.5
    assert ratio(WAYS, "wall_seconds", "published") == 1.0


def test_the_table_has_a_line_for_each_quantity() -> None:
    ratios = {name: {"verl": 0.25, "published": 0.5} for name in COLUMNS}
    lines = table("tiny", {"model_bytes": 2_000_000, "ways": WAYS, "ratios": ratios}).splitlines()
    assert lines[0].split() == ["tiny,", "2.0", "MB", "planned", "verl", "published", "/", "verl", "/", "published"]
    assert len(lines) == 1 + len(COLUMNS)
    assert lines[1].split()[-5:] == ["2.000", "4.000", "2.000", "0.250", "0.500"]


@pytest.mark.slow
def test_all_ways_move_the_same_weights(tmp_path: Path) -> None:
    """The benchmark itself compares every byte; its counts do not depend on the load of the machine."""
    assert main(["--model", "experts", "--repeats", "1", "--json", str(tmp_path / "results.json")]) == 0
    found = json.loads((tmp_path / "results.json").read_text())["experts"]
    planned, verl, published = (found["ways"][name] for name in ("planned", "verl", "published"))
    assert planned["collectives"][0] < published["collectives"][0] < verl["collectives"][0]
    assert found["ratios"]["bytes_handed_over"]["verl"] < 0.25
    assert found["ratios"]["bytes_handed_over"]["published"] < 0.5
