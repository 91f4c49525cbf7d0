"""The tables that the benchmark of a step's memory prints."""

from benchmarks.step_memory import WAYS, table, vocabulary_table
from post_training.report.metrics import ALLOCATED_BYTES_PREFIX, PEAK_BYTES_PREFIX


def metrics(reshard: float, update: float) -> dict[str, float]:
    peaks = {"reshard": reshard, "update": update}
    return {PEAK_BYTES_PREFIX + phase: value for phase, value in peaks.items()} | {
        ALLOCATED_BYTES_PREFIX + phase: value / 2 for phase, value in peaks.items()
    }


def test_the_table_holds_ours_against_each_other_way() -> None:
    found = dict(zip(WAYS, (metrics(2e6, 8e6), metrics(4e6, 8e6), metrics(16e6, 10e6)), strict=True))
    lines = [line.split() for line in table(found).splitlines()]
    assert lines[0][-4:] == ["/", "published", "/", "upstream"]
    assert lines[1] == ["reshard", "2.00", "1.00", "4.00", "2.00", "16.00", "8.00", "0.500", "0.125"]
    assert lines[2] == ["update", "8.00", "4.00", "8.00", "4.00", "10.00", "5.00", "1.000", "0.800"]
    assert lines[3] == ["whole", "step", "8.00", "8.00", "16.00", "1.000", "0.500"]


def test_vocabulary_table_compares_with_upstream() -> None:
    distances = {"log_probs": 1e-7, "entropy": 2e-7, "hidden": 3e-3, "weight": 4e-3}
    results = {"seconds_forward": 1.0, "seconds": 2.5} | distances
    found = {"upstream": {"peak": 8e8} | results, "ours": {"peak": 1e8} | results}
    lines = [line.split() for line in vocabulary_table(found).splitlines()]
    assert lines[1][:5] == ["upstream", "800.0", "1.000", "1.00", "2.50"]
    assert lines[2] == ["ours", "100.0", "0.125", "1.00", "2.50", "1.0e-07", "2.0e-07", "3.0e-03", "4.0e-03"]
