"""Sends a whole run to trackers again: `replay.py FOLDER METRICS TRACKER...`, with the lines of its metrics.jsonl."""

import json
import math
import sys
from pathlib import Path

from tests.verl_patches.features.tracking.job import CONFIG, Tracking
from verl_patches.features.tracking.run import RunTrackers


def replay(folder: Path, metrics: Path, names: list[str]) -> None:
    tracking = Tracking.__new__(Tracking)
    made = {}

    def make(each: str, config: dict) -> None:
        Tracking.__init__(tracking, "project", "experiment", [each], config)

    trackers = RunTrackers(tracking, make, names, CONFIG, folder)
    for line in metrics.read_text().splitlines():
        entry = json.loads(line)
        made = {name: math.nan if value is None else value for name, value in entry["metrics"].items()}
        trackers.log(lambda each, values, step=entry["step"]: tracking.log(values, step, [each]), made, entry["step"])
    trackers.close("finished")


if __name__ == "__main__":
    replay(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
