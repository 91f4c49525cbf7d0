"""Check the NPUs of a node from the output of the driver's tools: chips, their health, and their links.

Columns are found by their headings, which differ between releases of npu-smi: a 910B has `Chip Logic ID`, an A3 also
has `Chip Phy-ID`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.health_checks.finding import Finding, ask

# Folders in which the driver installs its tools; not all of them are on every PATH.
TOOL_FOLDERS = ("usr/local/bin", "usr/local/sbin", "usr/bin", "usr/sbin", "usr/local/Ascend/driver/tools")
# States of `hccn_tool -net_health` that do not describe the link: no address to detect was set, or only just now.
NOT_LOOKED_AT = ("Init", "Detect ip set")


@dataclass(frozen=True)
class Chip:
    """One die.

    Attributes:
        npu: number of its card.
        chip: number of the die on the card.
        logic: logical number on the node.
        physical: physical number on the node.
        name: of the chip.
    """

    npu: int
    chip: int
    logic: int
    physical: int
    name: str

    def __str__(self) -> str:
        return f"die {self.logic} (NPU {self.npu} chip {self.chip})"


def find_tool(name: str, root: Path = Path("/")) -> str:
    """Return the path of one of the driver's tools, on PATH or in the driver's folders; its name if not found."""
    places = [root / folder / name for folder in TOOL_FOLDERS]
    found = shutil.which(name) or next((str(path) for path in places if os.access(path, os.X_OK)), None)
    return found or name


def read_mapping(said: str) -> list[Chip]:
    """Return the chips in the output of `npu-smi info -m`, without rows that lack a logical number, such as the Mcu.

    The last column, `Chip Name`, may contain spaces. If `Chip Logic ID` or `Chip Phy-ID` is missing, the other one is
    used in its place.
    """
    chips, columns = [], []
    for line in said.splitlines():
        if "NPU ID" in line and "Chip ID" in line:
            columns = _headings(line)
            continue
        words = line.split(None, len(columns) - 1) if columns else []
        row = dict(zip(columns, words, strict=False))
        logic = row.get("Chip Logic ID", row.get("Chip Phy-ID", "-"))
        numbers = [row.get("NPU ID", ""), row.get("Chip ID", ""), logic, row.get("Chip Phy-ID", logic)]
        if all(number.isdigit() for number in numbers):
            npu, chip, of_node, physical = map(int, numbers)
            chips.append(Chip(npu, chip, of_node, physical, row.get("Chip Name", "").strip()))
    return chips


def _headings(line: str) -> list[str]:
    """Split the mapping's first line into headings, which may be one space apart: each ends with ID or Name."""
    found, words = [], []
    for word in line.split():
        words.append(word)
        if word.endswith("ID") or word == "Name":
            found.append(" ".join(words))
            words = []
    return found


@dataclass(frozen=True)
class Row:
    """A chip in the table of `npu-smi info`.

    Attributes:
        npu: number of its card.
        chip: number of the chip on the card.
        name: of the card.
        memory_mib: HBM; 0 if it is not shown.
    """

    npu: int
    chip: int
    name: str
    health: str
    memory_mib: int


def read_chips(said: str) -> list[Row]:
    """Return the chips in the table of `npu-smi info`.

    A chip has two lines there: the first with its card, name and health, the second with its own number and memory:

        | NPU   Name                | Health        | Power(W) ...
        | Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB) |
        | 7     Ascend910           | OK            | -
        | 1     15                  | 0000:83:00.0  | 0           0    / 0          3122 / 65536  |
    """
    rows: list[Row] = []
    column, first, usages = None, None, ""
    for line in said.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|") or not cells[0]:
            continue
        if cells[0].startswith("NPU"):
            # The table of processes begins with NPU, too, but has no health.
            column, first = (cells.index("Health") if "Health" in cells else None), None
        elif cells[0].startswith("Chip"):
            usages = cells[-1]
        elif column is not None and column < len(cells) and cells[0].split()[0].isdigit():
            number, _, rest = cells[0].partition(" ")
            if first is None:
                first = int(number), rest.strip(), cells[column]
            else:
                rows.append(Row(first[0], int(number), first[1], first[2], _memory(usages, cells[-1])))
                first = None
    return rows


def _memory(headings: str, values: str) -> int:
    """Return the total of the column HBM-Usage(MB), whose values are pairs such as `3122 / 65536`."""
    names = re.findall(r"(\S+)-Usage\(MB\)", headings)
    totals = re.findall(r"\d+\s*/\s*(\d+)", values)
    return int(dict(zip(names, totals, strict=False)).get("HBM", 0))


def read_health(said: str) -> dict[tuple[int, int], str]:
    """Return health by numbers of card and chip, from the table of `npu-smi info`."""
    return {(row.npu, row.chip): row.health for row in read_chips(said)}


def check_npus(dies: int, root: Path = Path("/"), nodes: int = 2) -> list[Finding]:
    """Check number and health of the NPUs, and the links that a job on this many nodes uses.

    Args:
        dies: number of this node's dies that the job takes.
        root: the top of the file system.
        nodes: number of the job's nodes; a single node sends nothing over the links of its dies.
    """
    smi = find_tool("npu-smi", root)
    listed = ask(smi, "info", "-m")
    if listed is None:
        return [
            Finding("NPUs", "npu-smi does not answer", "install the NPU driver, or pass npu-smi into the container")
        ]
    chips = read_mapping(listed)
    remedy = "" if len(chips) >= dies else f"{dies} are needed: check dmesg and the driver's log, reseat or reset"
    states = read_health(ask(smi, "info") or "")
    findings = [Finding("NPUs", f"{len(chips)} of {dies}", remedy)]
    findings += [_health(chip, states, smi) for chip in chips]
    tool = find_tool("hccn_tool", root)
    return findings + [link(chip, tool, nodes > 1) for chip in chips]


def _health(chip: Chip, states: Mapping[tuple[int, int], str], smi: str) -> Finding:
    state = states.get((chip.npu, chip.chip))
    if state is None:
        said = ask(smi, "info", "-t", "health", "-i", str(chip.npu), "-c", str(chip.chip)) or ""
        match = re.search(r"^\s*Health(?: Status)?\s*:\s*(\S+)", said, re.MULTILINE)
        state = match[1] if match else "no answer"
    remedy = f"see npu-smi info -t health -i {chip.npu} -c {chip.chip}; drain the node, reset or replace the card"
    return Finding(str(chip), f"{chip.name}, {state}", "" if state == "OK" else remedy)


def link(chip: Chip, tool: str, needed: bool = True) -> Finding:
    """Check the network link of one die, over which HCCL reaches other nodes. hccn_tool takes physical numbers."""
    what = f"link of die {chip.logic}"
    said = ask(tool, "-i", str(chip.physical), "-link", "-g")
    state = re.search(r"link status:\s*(\S+)", said or "")
    if not state:
        return Finding(what, "hccn_tool does not answer", known=False)
    if state[1].upper() != "UP" and not needed:
        return Finding(what, f"{state[1].lower()}; a job on one node does not use it")
    if state[1].upper() != "UP":
        return Finding(what, state[1].lower(), "check cable and switch port")
    health = re.search(
        r"net health status:\s*(\S.*?)\s*$", ask(tool, "-i", str(chip.physical), "-net_health", "-g") or "", re.M
    )
    if not health or health[1] in NOT_LOOKED_AT:
        return Finding(what, "up")
    well = health[1] == "Success"
    remedy = "" if well else "check addresses, gateway and switch: the address to detect does not answer"
    return Finding(what, f"up, {health[1]}", remedy)
