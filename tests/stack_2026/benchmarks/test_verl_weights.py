"""The benchmark of verl 0.9.1's weight transfers runs on two dies; it compares every weight with transformers'."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rehearsal.plan import ROOT

PROGRAM = ROOT / "benchmarks" / "verl_weights.py"


@pytest.mark.exhaustive
def test_all_ways_deliver_the_same_weights(tmp_path: Path) -> None:
    """Compare counts of collectives and bytes, which do not depend on the load of the machine."""
    results = tmp_path / "results.json"
    options = ["--model", "tiny", "--dies", "2", "--repeats", "1", "--bucket", "1", "--json", str(results)]
    run = subprocess.run([sys.executable, str(PROGRAM), *options], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    found = json.loads(results.read_text())
    for kind, way in (("colocated", "naive"), ("separate", "hccl")):
        theirs, ours = found[kind]["ways"][way], found[kind]["ways"]["alltoallv"]
        assert ours["collectives"][0] < theirs["collectives"][0]
        assert ours["bytes_handed_over"][0] < theirs["bytes_handed_over"][0]
