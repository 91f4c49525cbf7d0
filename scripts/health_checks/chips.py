"""Check a node's chips: family and memory against the cluster's file, and the links between cards of an Atlas A2."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from post_training.chips import A2, CARDS, FAMILIES, family_of
from post_training.plan.placement_text import parse_bytes
from scripts.health_checks.finding import Finding, ask
from scripts.health_checks.npus import find_tool, read_chips

# CANN's kernels are built for one family: an image for the other one finds none.
_OTHER_IMAGE = "use the image built for it (--build-arg CHIP, docs/first-hour.md)"


def check_chips(settings: Mapping[str, str], root: Path = Path("/")) -> Iterator[Finding]:
    """Check family and memory of the dies, as npu-smi shows them, against CHIP and DIE_MEMORY of the cluster's file.

    Args:
        settings: those of the cluster's file; without them, family and memory are only reported.
        root: the top of the file system.
    """
    smi = find_tool("npu-smi", root)
    rows = read_chips(ask(smi, "info") or "")
    if not rows:
        return
    names = sorted({row.name for row in rows})
    yield _family(names, len(rows), settings.get("CHIP"))
    memory = min(row.memory_mib for row in rows)
    if memory:
        yield _memory(memory, settings.get("DIE_MEMORY"))
    if family_of(names[0]) == A2 and len(rows) > 1:
        yield topology(ask(smi, "info", "-t", "topo") or "", int(settings["DIES_PER_NODE"]))


def _family(names: list[str], count: int, wanted: str | None) -> Finding:
    families = {family_of(name) for name in names}
    detail = f"{count} x {' and '.join(names)}"
    if len(families) > 1:
        return Finding("chip", detail, "select the dies of one kind with ASCEND_RT_VISIBLE_DEVICES")
    (family,) = families
    if family is None:
        return Finding("chip", f"{detail}, neither {' nor '.join(FAMILIES)} by its name", known=False)
    detail += f", Atlas {family}"
    if wanted and family != wanted:
        return Finding("chip", detail, f"CHIP={wanted} is invalid on this node. Set CHIP={family}, and {_OTHER_IMAGE}")
    return Finding("chip", detail)


def _memory(memory_mib: int, asked: str | None) -> Finding:
    detail = f"{memory_mib} MB"
    if not asked:
        return Finding("memory of a die", detail)
    detail += f" (DIE_MEMORY={asked})"
    if parse_bytes(asked) <= memory_mib << 20:
        return Finding("memory of a die", detail)
    usable = next((card.usable for card in CARDS.values() if card.memory_mib <= memory_mib), f"{memory_mib}MiB")
    return Finding("memory of a die", detail, f"set DIE_MEMORY={usable}, and plan the job again")


def topology(said: str, dies: int) -> Finding:
    """Check the links between the first `dies` cards of a node, from the matrix of `npu-smi info -t topo`.

    The eight cards on a board of an Atlas A2 reach each other over HCCS. Cards that do not are PCIe cards, or on two
    boards: they work, but collectives between them go through the host.
    """
    matrix = {int(row): words.split() for row, words in re.findall(r"^\s*NPU(\d+)\s+(.+)$", said, re.MULTILINE)}
    pairs = {
        (row, column): words[column]
        for row, words in matrix.items()
        for column in range(row + 1, min(dies, len(matrix)))
        if row < dies and len(words) >= len(matrix)
    }
    if not pairs:
        return Finding("links between cards", "npu-smi shows no topology", known=False)
    slow = [f"{row} and {column} over {how}" for (row, column), how in sorted(pairs.items()) if "HCCS" not in how]
    if not slow:
        return Finding("links between cards", f"HCCS between all {len(pairs)} pairs")
    remedy = "collectives between them go through the host; choose cards of one board with ASCEND_RT_VISIBLE_DEVICES"
    return Finding("links between cards", f"{len(slow)} of {len(pairs)} pairs without HCCS: {slow[0]}", remedy)
