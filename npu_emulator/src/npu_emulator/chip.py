"""Which chip is emulated: its name and the number by which torch_npu and what is built on it tell chips apart."""

from dataclasses import dataclass

import acl

# torch_npu's numbers (SocVersion of its 2.5.1) of the chips that training and vllm-ascend run on.
_ATLAS_A2 = ("Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910B3", "Ascend910B4", "Ascend910B4-1")
_ATLAS_A3 = (
    "Ascend910_9391",
    "Ascend910_9392",
    "Ascend910_9381",
    "Ascend910_9382",
    "Ascend910_9372",
    "Ascend910_9362",
)
SOC_VERSIONS = {name: 220 + place for place, name in enumerate(_ATLAS_A2)} | {
    name: 250 + place for place, name in enumerate(_ATLAS_A3)
}


@dataclass(frozen=True)
class Chip:
    """A chip by name, with torch_npu's number for it."""

    name: str
    soc_version: int


def chip_named(name: str) -> Chip:
    """The chip of this name. Raises RuntimeError for one that is not emulated."""
    if name not in SOC_VERSIONS:
        raise RuntimeError(f"NPU_EMULATOR_CHIP must be one of {', '.join(SOC_VERSIONS)}, not {name!r}")
    return Chip(name, SOC_VERSIONS[name])


CHIP = chip_named(acl.get_soc_name())
