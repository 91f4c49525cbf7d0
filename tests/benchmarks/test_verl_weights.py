"""The benchmark of verl 0.9.1's weight transfers: results computed from the processes' measurements."""

from types import SimpleNamespace
from typing import Any

from benchmarks.verl_weights import COLUMNS, costs, published, ratio, table

# Two training processes on two dies, then their workers; one repetition.
MEASURED = [[dict.fromkeys(COLUMNS, float(number))] for number in (1, 2, 30, 4)]


def request(separate: bool) -> Any:
    return SimpleNamespace(dies=2 if not separate else 4, separate=separate)


def test_peak_is_of_the_die_whose_two_processes_have_most() -> None:
    found = costs(MEASURED, request(separate=False))
    assert found["peak_bytes"] == [31.0] and found["wall_seconds"] == [30.0] and found["bytes_copied"] == [37.0]
    assert costs(MEASURED, request(separate=True))["peak_bytes"] == [30.0]


def test_ratio_is_the_median_over_repeats() -> None:
    assert ratio([1.0, 2.0, 9.0], [4.0, 4.0, 4.0]) == 0.5
    assert ratio([1.0], [0.0]) is None


def test_table_has_a_line_for_each_quantity() -> None:
    ways = {way: dict.fromkeys(COLUMNS, [value]) for way, value in (("naive", 4.0), ("alltoallv", 1.0))}
    found = {"request": {"dies": 8}, "ways": ways, "ratios": dict.fromkeys(COLUMNS, 0.25)}
    lines = table("colocated", 2_000_000, found).splitlines()
    assert lines[0].split() == ["colocated,", "8", "dies,", "2.0", "MB", "naive", "alltoallv", "ratio"]
    assert len(lines) == 1 + len(COLUMNS) and lines[1].split()[-3:] == ["4.000", "1.000", "0.250"]


def test_deepseek_receives_a_fiftieth_of_what_gathering_needs() -> None:
    computed = published()
    assert computed["ratio"] <= 0.02 and 20e9 < computed["alltoallv"] < 30e9
