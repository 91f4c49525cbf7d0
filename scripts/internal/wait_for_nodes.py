#!/usr/bin/env python3
"""Wait until enough nodes with enough NPUs have joined a Ray cluster, and
compare them.

Exit codes: 0 they are there and agree, 1 not in time, 3 they run different
code, 4 Ray does not answer. A clock that is off is only reported.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from post_training.arguments import finite  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402
from scripts.health_checks.cluster import NodeFacts, ask_nodes, compare_nodes  # noqa: E402
from scripts.health_checks.finding import Finding  # noqa: E402

_SECONDS_BETWEEN_LINES = 10


def wait_for_nodes(
    list_nodes: Callable[[], Sequence[Mapping[str, Any]]],
    nodes: int,
    dies: int,
    timeout: float,
    interval: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Poll `list_nodes` (as `ray.nodes`) until `nodes` living nodes have `dies` NPUs each; False after `timeout` s."""
    begun = shown = clock()
    while True:
        found = {
            node["NodeManagerAddress"]: int(node["Resources"].get("NPU", 0)) for node in list_nodes() if node["Alive"]
        }
        ready = [address for address, count in found.items() if count >= dies]
        now = clock()
        if len(ready) >= nodes:
            print(
                f"{len(ready)} of {nodes} nodes with {dies} NPUs each are there: {', '.join(sorted(ready))}", flush=True
            )
            return True
        if now - begun >= timeout or now - shown >= _SECONDS_BETWEEN_LINES:
            shown = now
            short = [f"{address} has {count} NPUs" for address, count in sorted(found.items()) if count < dies]
            there = ", ".join(sorted(ready)) or "none"
            print(f"{len(ready)} of {nodes} nodes after {now - begun:.0f} s: {'; '.join([there, *short])}", flush=True)
        if now - begun >= timeout:
            return False
        sleep(interval)


def agree(facts: Sequence[NodeFacts], nodes: int, dies: int) -> bool:
    """Print the problems of the nodes; return False if they run different code."""
    bad = [finding for finding in compare_nodes(facts, nodes, dies) if finding.remedy]
    for finding in bad:
        print(finding.line(), flush=True)
    return all(finding.what.endswith(" clock") for finding in bad)


def rejection(address: str, error: Exception) -> tuple[int, str]:
    """Return the exit code and the sentence for an error that Ray raised when this node connected."""
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", str(error))
    if len(versions) < 2:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return 4, f"Ray at {address} does not answer: {said}"
    there, here = (f"Ray {ray} with Python {python}" for ray, python in versions[:2])
    return 3, Finding("Ray", f"{address} runs {there}, this node {here}", "install the same image").line()


def main(arguments: list[str] | None = None) -> int:
    """Join the cluster as a driver, wait, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="HOST:PORT of the head")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--dies", type=int, required=True, help="NPUs that every node must have")
    parser.add_argument("--timeout", type=finite(), required=True, help="seconds")
    parser.add_argument("--interval", type=finite(), default=5.0, help="seconds between two polls")
    parser.add_argument("--stack", default="2025", help="packages to compare")
    options = parser.parse_args(arguments)
    import ray

    try:
        ray.init(address=options.address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        code, sentence = rejection(options.address, error)
        print(sentence, flush=True)
        return code
    try:
        if not wait_for_nodes(ray.nodes, options.nodes, options.dies, options.timeout, options.interval):
            return 1
    finally:
        ray.shutdown()
    return 0 if agree(ask_nodes(options.address, ROOT, options.stack), options.nodes, options.dies) else 3


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
