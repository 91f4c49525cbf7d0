#!/usr/bin/env python3
r"""Check this node for a job; with --ray, compare all nodes of a running Ray.

Dies 0 and 1 are tested in child processes, which takes at most ten seconds once they have started. Pass --no-self-test
where a job uses these dies. Every line that begins with BAD ends with what to do.

Examples:
    python scripts/doctor.py --cluster scripts/env/a3_256_dies.env
    python scripts/doctor.py --ray 10.0.0.1:6379 --no-self-test
    python scripts/doctor.py --stack 2026
    python scripts/doctor.py --stack 2026 \
        --cluster scripts/env/a3_256_dies_2026.env

Exit codes: 0 nothing is bad; 1 something is; 2 the cluster's file cannot be read.
"""

import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from post_training.command_parser import CommandParser  # noqa: E402
from post_training.environment_files import read_environment  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402
from scripts.health_checks.cluster import ask_nodes, compare_nodes  # noqa: E402
from scripts.health_checks.device_test import check_device  # noqa: E402
from scripts.health_checks.finding import Finding  # noqa: E402
from scripts.health_checks.node import CANN, check_node, check_software  # noqa: E402

CLUSTERS = {"2025": "a3_256_dies.env", "2026": "a3_256_dies_2026.env"}


def main(arguments: list[str] | None = None) -> int:
    """Run the health checks and return the exit code."""
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="settings of the cluster (default: scripts/env/a3_256_dies.env; with --stack 2026 and neither this nor "
        "--ray, packages and dies are checked alone)",
    )
    parser.add_argument("--ray", metavar="HOST:PORT", help="the head of a running Ray")
    parser.add_argument("--no-self-test", action="store_true", help="skip the test of dies 0 and 1")
    stack = "versions to look for (default: %(default)s)"
    parser.add_argument("--stack", choices=sorted(CANN), default="2025", metavar="NAME", help=stack)
    options = parser.parse_args(arguments)
    if options.stack != "2025" and not (options.cluster or options.ray):
        return report(check_software(options.stack) + ([] if options.no_self_test else check_device()))
    try:
        settings = read_settings(options.cluster or ROOT / "scripts" / "env" / CLUSTERS[options.stack])
        if options.ray:
            check_address(options.ray)
        findings = check_node(settings, job_runs=bool(options.ray), stack=options.stack)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not options.no_self_test:
        findings += check_device()
    if options.ray:
        facts = ask_nodes(options.ray, ROOT, options.stack)
        findings += compare_nodes(facts, int(settings["NODES"]), int(settings["DIES_PER_NODE"]))
    return report(findings)


def report(findings: list[Finding]) -> int:
    """Print the findings and return the exit code."""
    for finding in findings:
        print(finding.line())
    bad = sum(bool(finding.remedy) for finding in findings)
    print(f"{bad} of {len(findings)} are bad" if bad else f"all {len(findings)} are fine, or could not be checked")
    return 1 if bad else 0


def read_settings(path: Path) -> dict[str, str]:
    """Return a cluster file's settings if the launcher accepts it, or else raise ValueError with its sentence."""
    parts = "for part in terminal arguments settings cluster; do source scripts/lib/$part.sh; done"
    check = f'cd "$1"; {parts}; cluster_read "$2"'
    done = subprocess.run(
        ["bash", "-euc", check, "bash", ROOT, path.absolute()], capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        raise ValueError(done.stderr.strip().removeprefix("error: "))
    return read_environment(path)


def check_address(address: str) -> None:
    """Raise ValueError unless a server answers at HOST:PORT; Ray itself would try for minutes."""
    match = re.fullmatch(r"([^:\s]+):([1-9]\d{0,4})", address)
    if not match or int(match[2]) > 65535:
        raise ValueError(f"--ray={address!r} is invalid. Set it to HOST:PORT of a running Ray, such as 10.0.0.1:6379")
    try:
        socket.create_connection((match[1], int(match[2])), timeout=10).close()
    except OSError as error:
        raise ValueError(
            f"--ray={address} is invalid: no answer ({error}). Start the job or a Ray there first"
        ) from error


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
