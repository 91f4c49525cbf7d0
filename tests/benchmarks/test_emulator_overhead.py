"""The overhead benchmark runs, and compares the same layer on both sides."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_npu  # noqa: F401

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "emulator_overhead.py"


@pytest.fixture(scope="module")
def benchmark() -> dict:
    return runpy.run_path(str(SCRIPT))


def test_both_sides_compute_the_same(benchmark):
    torch.manual_seed(0)
    layer = benchmark["TransformerLayer"](16)
    states = torch.randn(2, 8, 16)
    expected = layer(states)
    assert torch.allclose(layer.to("npu")(states.to("npu")).cpu(), expected, atol=1e-6)
    assert not torch.allclose(layer(states.flip(1).to("npu")).cpu(), expected, atol=1e-6)


def test_the_ratio_is_that_of_the_two_sides(benchmark, monkeypatch):
    """Replace the timing of a step, so that one side takes exactly three times as long."""
    seconds = {"cpu": 0.25, "npu": 0.75}
    monkeypatch.setitem(
        benchmark["compare"].__globals__, "turn", lambda device, _: (seconds[device], seconds[device] / 5)
    )
    compared = benchmark["compare"]("forward", lambda width, device: device, 8, 4)
    assert (compared.wall_ratio, compared.npu_wall_ms, compared.cpu_processor_ms) == (3, 750, 50)
    assert "3.00x" in benchmark["table"]([compared])


def test_it_prints_a_table_and_writes_json(tmp_path):
    file = tmp_path / "overhead.json"
    command = [sys.executable, str(SCRIPT), "--widths", "8", "--pairs", "1", "--json", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = json.loads(file.read_text())
    assert [(row["step"], row["width"]) for row in rows] == [("forward", 8), ("training", 8)]
    assert all(row["wall_ratio"] > 0 and row["processor_ratio"] > 0 for row in rows)
    assert printed.count("x |") == 2
