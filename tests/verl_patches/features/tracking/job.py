"""One start of a run as its trackers see it: `job.py FOLDER TRACKER FIRST LAST ENDING [RESUMED IDS]`.

Logs the steps FIRST to LAST through verl's own Tracking. ENDING is finished, failed, or none for a process that is gone
before it can end anything. RESUMED is the step from which it resumes, IDS the runs of its checkpoint as JSON. Prints
the ids for the next checkpoint as JSON.
"""

import json
import math
import os
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

from verl_patches.features.tracking.run import RunTrackers


def verls_tracking():
    """Return verl's class, loaded from its file: importing the rest of verl takes long."""
    package = Path(find_spec("verl").submodule_search_locations[0])
    spec = spec_from_file_location("verl_utils_tracking", package / "utils" / "tracking.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Tracking


Tracking = verls_tracking()
CONFIG = {"trainer": {"name": "x", "steps": 5}, "api_key": "not-to-be-sent"}


def metrics(step: int, begun: int) -> dict:
    """Return the metrics that a step logs; `begun` is the first step after its start, which tells the starts apart."""
    return {"critic/score/mean": step / 10, "begun": begun, "val/acc@1(数)": 0.5, "words": "text", "bad": math.nan}


def log_steps(folder: Path, name: str, first: int, last: int, resumed: dict | None = None) -> RunTrackers:
    """Return the trackers of a start that has logged its steps; `resumed` is the state in its checkpoint."""
    tracking = Tracking.__new__(Tracking)

    def make(each: str, config: dict) -> None:
        Tracking.__init__(tracking, "project", "experiment", [each], config)

    trackers = RunTrackers(tracking, make, [name], {**CONFIG, "resumed": resumed}, folder)
    if resumed is not None:
        trackers.go_on(resumed)
    for step in range(first, last + 1):
        trackers.log(lambda each, values, step=step: tracking.log(values, step, [each]), metrics(step, first), step)
    return trackers


if __name__ == "__main__":
    folder, name, first, last, ending, *again = sys.argv[1:]
    resumed = {"step": int(again[0]), "runs": json.loads(again[1])} if again else None
    trackers = log_steps(Path(folder), name, int(first), int(last), resumed)
    print(json.dumps(trackers.state()["runs"]), flush=True)
    if ending == "none":
        os._exit(0)
    trackers.close(ending)
