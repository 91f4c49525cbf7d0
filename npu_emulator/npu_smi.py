#!/usr/bin/env python3
"""The driver's command npu-smi for the emulated dies, as far as vLLM-Ascend, verl and this project's checks need it.

    npu-smi info                          chips with their health, and an empty table of processes
    npu-smi info -m                       numbers of cards and chips, and their logical numbers
    npu-smi info -t board -i CARD         with the version of the driver
    npu-smi info -t health -i CARD

The tables have the form of an Atlas A2 (a card is one chip) or, with NPU_EMULATOR_CHIP=Ascend910_9391, of an A3 (a card
is two chips). Values that the emulator lacks, such as power, temperature and bus addresses, are `NA`. Processes are not
listed. Standard library only: any Python runs it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NamedTuple

DRIVER = "25.5.0"  # as aclsysGetCANNVersion says it
TOOLKIT = Path(__file__).resolve().parents[1]
COLUMN = 31
RULE = "+---------------------------+---------------+----------------------------------------------------+"
DOUBLE = RULE.replace("-", "=")
WIDE = "+------------------------------------------------------------------------------------------------+"


class Chip(NamedTuple):
    """A die: its card, its number on the card, and its number on the machine."""

    card: int
    chip: int
    die: int


class Machine(NamedTuple):
    """The emulated dies of this machine."""

    name: str
    chips: list[Chip]
    memory_mib: int

    @property
    def is_a3(self) -> bool:
        return "910_93" in self.name

    @property
    def per_card(self) -> int:
        return 2 if self.is_a3 else 1

    @property
    def shown(self) -> str:
        return "Ascend910" if self.is_a3 else self.name.removeprefix("Ascend")

    @classmethod
    def here(cls) -> Machine:
        """Return the machine that the emulator's environment variables describe."""
        name = os.environ.get("NPU_EMULATOR_CHIP") or (TOOLKIT / "chip").read_text().strip()
        dies = range(int(os.environ.get("NPU_EMULATOR_DEVICES") or 8))
        width = 2 if "910_93" in name else 1
        chips = [Chip(die // width, die % width, die) for die in dies]
        return cls(name, chips, int(os.environ.get("NPU_EMULATOR_CAPACITY_MB") or 4096))


def columns(*words: object) -> str:
    return "\t" + "".join(f"{word!s:<{COLUMN}}" for word in words).rstrip()


def mapping(machine: Machine) -> list[str]:
    """Return the rows of `info -m`; each card ends with its controller (Mcu), which has no logical number."""
    heading = ["NPU ID", "Chip ID", "Chip Logic ID", *(["Chip Phy-ID"] if machine.is_a3 else []), "Chip Name"]
    lines = [columns(*heading)]
    name = "Ascend910" if machine.is_a3 else f"Ascend {machine.shown}"
    for chip in machine.chips:
        numbers = [chip.die] * (len(heading) - 3)
        lines.append(columns(chip.card, chip.chip, *numbers, name))
        if chip.chip == machine.per_card - 1:
            lines.append(columns(chip.card, machine.per_card, *["-"] * len(numbers), "Mcu"))
    return lines


def table(machine: Machine) -> list[str]:
    numbers = "Chip  Phy-ID" if machine.is_a3 else "Chip"
    lines = [
        WIDE,
        f"| {f'npu-smi {DRIVER}':<32} {f'Version: {DRIVER}':<61} |",
        RULE,
        "| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|",
        f"| {numbers:<25} | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |",
        DOUBLE,
    ]
    for chip in machine.chips:
        number = f"{chip.chip:<5} {chip.die}" if machine.is_a3 else f"{chip.chip}"
        lines += [
            f"| {chip.card:<5} {machine.shown:<19} | OK            | {'NA':<11} {'NA':<17} {'0    / 0':<20} |",
            f"| {number:<25} | NA            | 0           0    / 0          {f'0    / {machine.memory_mib}':<20} |",
            DOUBLE,
        ]
    lines += [
        RULE,
        "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |",
        DOUBLE,
    ]
    for card in dict.fromkeys(chip.card for chip in machine.chips):
        lines += [f"| {f'No running processes found in NPU {card}':<94} |", DOUBLE]
    return lines


def fields(pairs: dict[str, object]) -> list[str]:
    return [f"\t{name:<30} : {value}" for name, value in pairs.items()]


def answer(machine: Machine, given: argparse.Namespace) -> list[str] | None:
    """Return the lines of the answer; None if there is no such card or chip, or the command names none."""
    if given.m:
        return mapping(machine)
    if given.type is None:
        return table(machine)
    chips = [chip for chip in machine.chips if chip.card == given.card and given.chip in (None, chip.chip)]
    if not chips:
        return None
    if given.type == "health":
        return fields({"NPU ID": given.card, "Health Status": "OK"})
    board = {
        "NPU ID": given.card,
        "Product Name": "NA",
        "Manufacturer": "NA",
        "Software Version": DRIVER,
        "Firmware Version": "NA",
        "Compatibility": "OK",
        "PCIe Bus Info": "NA",
        "Chip Count": machine.per_card,
    }
    return fields(board)


def main() -> int:
    parser = argparse.ArgumentParser(prog="npu-smi", description="npu-smi of the emulated dies.")
    parser.add_argument("command", choices=["info"])
    parser.add_argument("-m", action="store_true", help="numbers of cards and chips")
    parser.add_argument("-t", dest="type", choices=["board", "health"], help="information to print about a card")
    parser.add_argument("-i", dest="card", type=int, help="the card")
    parser.add_argument("-c", dest="chip", type=int, help="the chip of the card")
    given = parser.parse_args()
    lines = answer(Machine.here(), given)
    if lines is None:
        print(f"npu-smi: no card {given.card} with such a chip (NPU_EMULATOR_DEVICES)")
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
