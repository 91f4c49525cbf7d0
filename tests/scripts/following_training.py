"""A launcher on a node that gives its dies to the head's training: says so, and ends with 0 when a start of that ended.

Usage: following_training.py RECORD STARTS; the n-th start waits for the n-th decision of the head in the supervisors'
record, or for its last one.
"""

import json
import sys
import time
from pathlib import Path


def main(record: Path, starts: Path) -> None:
    print("node 10.0.0.2 is the worker; logs are in /logs", flush=True)
    with starts.open("a") as file:
        file.write("a start\n")
    number = len(starts.read_text().splitlines())
    while True:
        complete = record.read_text().rpartition("\n")[0].splitlines()
        said = [json.loads(line) for line in complete]
        if any("ended" in each for each in said) or sum("again_s" in each for each in said) >= number:
            print("the head has ended the job; how it went is in the head's log", flush=True)
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
