"""The features residency and phases: configuration, switch, and the settings that exclude residency."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from overlay import ConfigurationError, Feature

Addresses = Literal["released", "reserved"]


@dataclass(frozen=True)
class ResidencySettings:
    """Keep on the device only what the present phase needs.

    rollout_addresses: `released` gives the addresses of rollout weights back with their memory, and they come back to
    others; with `reserved` the weights keep theirs for the life of the process.
    """

    enabled: bool = True
    rollout_addresses: Addresses = "released"

    @property
    def reserves_addresses(self) -> bool:
        """Whether rollout weights return to the addresses that they had before."""
        return self.enabled and self.rollout_addresses == "reserved"


def check_offload(config: Mapping[str, Any], settings: Any) -> None:
    """Check that verl's own offload switches are off, because residency moves the same tensors."""
    of_actor = config["actor_rollout_ref"]
    roles = [("actor_rollout_ref.actor", of_actor["actor"]), ("actor_rollout_ref.ref", of_actor["ref"])]
    if config["algorithm"]["adv_estimator"] == "gae":
        roles.append(("critic", config["critic"]))
    for role, values in roles:
        for key in ("param_offload", "grad_offload", "optimizer_offload"):
            if values["megatron"].get(key, False):
                raise ConfigurationError(
                    f"{role}.megatron.{key}=True and {RESIDENCY.switch}=true would both move the same tensors. Switch "
                    "one of them off"
                )


def check_addresses(config: Mapping[str, Any], settings: Any) -> None:
    """Check that reserved addresses are possible: torch_npu's allocator must take memory from pools.

    The driver has the same environment as the dies.
    """
    if settings.residency.reserves_addresses:
        reject_expandable_segments()


def reject_expandable_segments() -> None:
    """Reject expandable segments, with which torch_npu takes no memory from pools.

    vLLM-Ascend's allocator does not notice them, because it reads another vendor's variable.

    Raises:
        ConfigurationError: PYTORCH_NPU_ALLOC_CONF enables them.
    """
    options = os.environ.get("PYTORCH_NPU_ALLOC_CONF", "").replace(" ", "").split(",")
    if "expandable_segments:True" in options:
        raise ConfigurationError(
            "actor_rollout_ref.overlay.residency.rollout_addresses=reserved needs a memory pool, but "
            "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True does not allow one. Set it to released, or remove that "
            "option"
        )


PHASES = Feature(
    name="phases",
    purpose="A step has phases, for which device memory is measured and, with residency, the device's content changes.",
)

RESIDENCY = Feature(
    name="residency",
    purpose="Each phase of a step keeps only what it needs in device memory; the rest waits in host memory.",
    section="actor_rollout_ref.overlay.residency",
    settings=ResidencySettings,
    checks=(check_offload, check_addresses),
)
