"""Measure what a cold import of the prelude costs beside a bare interpreter.

Processes with and without the import alternate, so that other load on the machine affects both. Prints the medians over
the pairs of the differences in CPU time (user and system) and in wall-clock time, in milliseconds.

Example:
    python benchmarks/prelude_import.py --pairs 21
"""

import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.options import make_parser, write_results  # noqa: E402
from post_training.arguments import whole  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[1]
BARE, PRELUDE = "pass", "from verl_patches import prelude_patch"


def cost(code: str) -> tuple[float, float]:
    """Return milliseconds of CPU and wall-clock time that an interpreter takes for `code`."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return 1000 * cpu, 1000 * wall


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=whole(1), default=21, help="runs of each (default: %(default)s)")
    options = parser.parse_args()
    pairs, results = options.pairs, {}
    cost(PRELUDE)
    measured = [(cost(BARE), cost(PRELUDE)) for _ in range(pairs)]
    for index, name in enumerate(("CPU", "wall")):
        differences = sorted(prelude[index] - bare[index] for bare, prelude in measured)
        median, least, most = statistics.median(differences), differences[0], differences[-1]
        results[name] = {"median_ms": median, "least_ms": least, "most_ms": most, "pairs": pairs}
        print(f"{name}: {median:.0f} ms more than a bare interpreter ({least:.0f} to {most:.0f} in {pairs} pairs)")
    write_results(options.json, results)


if __name__ == "__main__":
    main()
