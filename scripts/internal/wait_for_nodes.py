#!/usr/bin/env python3
"""Waits until enough nodes with enough NPUs have joined a Ray cluster. Exit codes: 0 they have, 1 not in time."""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    """Polls `list_nodes` (as `ray.nodes`) until `nodes` living nodes have `dies` NPUs each; False after `timeout` s."""
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


def main(arguments: list[str] | None = None) -> int:
    """Joins the cluster as a driver and waits; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="HOST:PORT of the head")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--dies", type=int, required=True, help="NPUs that every node has to have")
    parser.add_argument("--timeout", type=float, required=True, help="seconds")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two looks")
    options = parser.parse_args(arguments)
    import ray

    ray.init(address=options.address, log_to_driver=False, logging_level="ERROR")
    try:
        return 0 if wait_for_nodes(ray.nodes, options.nodes, options.dies, options.timeout, options.interval) else 1
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
