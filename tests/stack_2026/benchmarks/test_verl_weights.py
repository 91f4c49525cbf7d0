"""The benchmark of verl 0.9.1's weight transfers runs on two dies; it compares every weight with transformers'."""

import json
from pathlib import Path

import pytest

from benchmarks.verl_weights import main


@pytest.mark.slow
def test_all_ways_deliver_the_same_weights(tmp_path: Path) -> None:
    """What is counted does not depend on how busy the machine is."""
    results = tmp_path / "results.json"
    assert main(["--model", "tiny", "--dies", "2", "--repeats", "1", "--bucket", "1", "--json", str(results)]) == 0
    found = json.loads(results.read_text())
    for kind, way in (("colocated", "naive"), ("separate", "hccl")):
        theirs, ours = found[kind]["ways"][way], found[kind]["ways"]["alltoallv"]
        assert ours["collectives"][0] < theirs["collectives"][0]
        assert ours["bytes_handed_over"][0] < theirs["bytes_handed_over"][0]
