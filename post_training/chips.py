"""Families of Ascend chips, recognised by the names that the driver and CANN give them, and the cards of each.

Names come from `npu-smi info` (`910B3`, `Ascend910`), from `npu-smi info -m` (`Ascend 910B4`, `Ascend910`) or from
CANN's `aclrtGetSocName` (`Ascend910B3`, `Ascend910_9391`). A card of an Atlas A2 is one die; that of an Atlas A3 two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

A2, A3 = "A2", "A3"
FAMILIES = (A2, A3)


@dataclass(frozen=True)
class Card:
    """A product.

    Attributes:
        dies_per_node: The usual number.
        memory_mib: Memory of a die as npu-smi shows it.
        usable: Memory of a die that tensors can use.
    """

    dies_per_node: int
    memory_mib: int
    usable: str


# 910B4 is the only chip of an Atlas A2 with 32 GB; 910B4-1 has 64 GB.
CARDS = {
    "A3": Card(16, 65536, "61GiB"),
    "A2 with 64 GB": Card(8, 65536, "61GiB"),
    "A2 with 32 GB": Card(8, 32768, "29GiB"),
}


def family_of(name: str) -> str | None:
    """Return the family of a chip by its name; None for a chip of another family, or for an empty name."""
    compact = name.replace(" ", "").upper()
    if re.fullmatch(r"(ASCEND)?910B\d\w*(-\d)?", compact):
        return A2
    # The driver calls a die of an Atlas A3 Ascend910 and says no more.
    if compact == "ASCEND910" or re.fullmatch(r"(ASCEND)?910_93\w+", compact):
        return A3
    return None


def family_of_this_machine() -> str | None:
    """Return the family of this machine's chips by CANN's name for them; None if CANN is not installed.

    pyACL answers without taking a die, which torch_npu would.
    """
    try:
        import acl
    except ImportError:
        return None
    return family_of(acl.get_soc_name() or "")
