"""Families of Ascend chips: what a name of the driver or of CANN says, and what a job needs to know of each.

A name is that of `npu-smi info` (`910B3`, `Ascend910`), of `npu-smi info -m` (`Ascend 910B4`, `Ascend910`) or of CANN's
`aclrtGetSocName` (`Ascend910B3`, `Ascend910_9391`). A card of an Atlas A2 is one die; a card of an Atlas A3 has two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

A2, A3 = "A2", "A3"
FAMILIES = (A2, A3)


@dataclass(frozen=True)
class Card:
    """A product: the usual dies of a node, the memory of a die in MiB as npu-smi shows it, and what tensors can use."""

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
    """The family of a chip by its name; None for a chip of another family, or for no name."""
    compact = name.replace(" ", "").upper()
    if re.fullmatch(r"(ASCEND)?910B\d\w*(-\d)?", compact):
        return A2
    # The driver calls a die of an Atlas A3 Ascend910 and says no more.
    if compact == "ASCEND910" or re.fullmatch(r"(ASCEND)?910_93\w+", compact):
        return A3
    return None


def family_of_this_machine() -> str | None:
    """The family of this machine's chips by CANN's own name for them; None where CANN is not installed.

    pyACL answers without taking a die, which torch_npu would.
    """
    try:
        import acl
    except ImportError:
        return None
    return family_of(acl.get_soc_name() or "")
