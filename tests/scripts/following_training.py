"""A launcher on a node that gives its dies to the head's training: it reports that, and ends with each start of it.

Usage: following_training.py RECORD STARTS CODE; the n-th start waits for the head's n-th decision in the supervisors'
record, or for its last one. It ends with 0 after the last one, and with CODE after any other.
"""

import json
import sys
import time
from pathlib import Path

from post_training.start_status import report_status


def main(record: Path, starts: Path, code: int) -> int:
    report_status(role="worker", phase="waiting")
    with starts.open("a") as file:
        file.write("a start\n")
    number = len(starts.read_text().splitlines())
    while True:
        complete = record.read_text().rpartition("\n")[0].splitlines()
        said = [json.loads(line) for line in complete]
        over = any("ended" in each for each in said)
        if over or sum("again_s" in each for each in said) >= number:
            print("the head has ended the job; see its log for the result", flush=True)
            return 0 if over else code
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
