#!/usr/bin/env python3
"""Examines this node for a job, and with --ray ADDRESS all nodes of a Ray that runs against each other.

Every line that begins with BAD ends with what to do. Exit codes: 0 nothing is bad, 1 something is, 2 the cluster's file
cannot be read.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.examination.cluster import ask_nodes, compare_nodes  # noqa: E402
from scripts.examination.node import examine_node  # noqa: E402
from scripts.rehearsal.plan import read_environment  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Examines; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, default=ROOT / "scripts" / "env" / "a3_256_dies.env")
    parser.add_argument("--ray", metavar="ADDRESS", help="HOST:PORT of a Ray that runs")
    options = parser.parse_args(arguments)
    try:
        settings = read_environment(options.cluster)
        open_values = [name for name, value in settings.items() if "<" in value]
        if open_values:
            raise ValueError(f"{', '.join(open_values)} in {options.cluster} are placeholders; fill them in")
        findings = examine_node(settings)
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.ray:
        findings += compare_nodes(ask_nodes(options.ray, ROOT), int(settings["NODES"]), int(settings["DIES_PER_NODE"]))
    for finding in findings:
        print(finding.line())
    bad = sum(bool(finding.remedy) for finding in findings)
    print(f"{bad} of {len(findings)} are bad" if bad else f"all {len(findings)} are well, or could not be looked at")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
