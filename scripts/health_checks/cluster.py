"""Compare the nodes of a running Ray cluster: resources, clocks, versions."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlay.pins import Pins
from scripts.health_checks.finding import Finding

CLOCK_SECONDS = 1.0


@dataclass(frozen=True)
class NodeFacts:
    """The facts that one node reports.

    Attributes:
        clock_offset: seconds that its clock is ahead of the asking node's.
        tree: a hash of the overlay.
        error: why the node could not report; empty if it could.
    """

    address: str
    npus: int
    clock_offset: float
    versions: dict[str, str]
    tree: str
    error: str = ""


def compare_nodes(nodes: Sequence[NodeFacts], count: int, dies: int) -> list[Finding]:
    """Return findings about the cluster; the other nodes are compared with the first one that answers."""
    there = ", ".join(node.address for node in nodes)
    findings = [
        Finding("nodes", f"{len(nodes)} of {count}: {there}", "" if len(nodes) >= count else "start the missing ones")
    ]
    first: NodeFacts | None = None
    for node in nodes:
        if node.error:
            findings.append(
                Finding(
                    f"{node.address} overlay", node.error, "put the same checkout under the same path on every node"
                )
            )
            continue
        first = first or node
        short = f"start Ray there with --resources for {dies}" if node.npus < dies else ""
        findings.append(Finding(f"{node.address} NPUs", f"{node.npus} of {dies}", short))
        apart = abs(node.clock_offset - first.clock_offset)
        wrong = "set the clocks with chrony or ntpd" if apart > CLOCK_SECONDS else ""
        findings.append(Finding(f"{node.address} clock", f"{apart:.2f} s apart", wrong))
        other = [
            f"{name} {node.versions.get(name)} instead of {version}"
            for name, version in first.versions.items()
            if node.versions.get(name) != version
        ]
        findings.append(
            Finding(f"{node.address} pins", ", ".join(other) or "the same", "install the same image" if other else "")
        )
        same = node.tree == first.tree
        findings.append(
            Finding(
                f"{node.address} overlay",
                "the same" if same else "another",
                "" if same else "copy the same checkout to every node",
            )
        )
    return findings


def tree_hash(root: Path, stack: str = "2025") -> str:
    """Return a hash over the Python, YAML, TOML and patch files of the overlay and its patch packages."""
    total = hashlib.sha256()
    for package in ("overlay", *sorted(Pins.read(stack=stack).patch_packages())):
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".yaml", ".patch", ".toml"):
                total.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return total.hexdigest()[:16]


def ask_nodes(address: str, root: Path, stack: str = "2025") -> list[NodeFacts]:
    """Ask every living node of the Ray at `address` about a stack; the repository is at `root` on each."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from verl_patches.trainer.isolated_ray import python_of_workers

    def report() -> tuple[float, dict[str, str], str]:
        # Imported there, and not sent with the question, so that a node without the checkout reports that.
        from scripts.health_checks.cluster import tree_hash
        from scripts.health_checks.node import versions

        return time.time(), versions(stack), tree_hash(root, stack)

    environment = {"env_vars": {"PYTHONPATH": str(root)}, **python_of_workers()}
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", runtime_env=environment)
    try:
        facts = []
        for node in sorted(
            (node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"]
        ):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asking = ray.remote(num_cpus=0, max_retries=0)(report).options(scheduling_strategy=there)
            npus = int(node["Resources"].get("NPU", 0))
            facts.append(_ask_node(node["NodeManagerAddress"], npus, asking))
        return facts
    finally:
        ray.shutdown()


def _ask_node(address: str, npus: int, asking: Any) -> NodeFacts:
    """Ask one node twice, because the first question starts a process, which takes seconds.

    `asking` is the remote function, bound to the node, that returns its time, its versions and the hash of its tree.
    """
    import ray
    from ray.exceptions import RayError

    try:
        ray.get(asking.remote())
        begun = time.time()
        clock, installed, tree = ray.get(asking.remote())
    except RayError as error:
        said = str(error).strip().splitlines()[-1]
        return NodeFacts(address, npus, 0.0, {}, "", error=f"does not answer: {said}")
    return NodeFacts(address, npus, clock - (begun + time.time()) / 2, installed, tree)
