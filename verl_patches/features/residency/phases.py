"""The phases of a training step and what each of them needs on the device.

reshard        the training weights are read, the rollout weights written
rollout        generation: the KV cache is created now, after the training state has left
old_log_prob   the actor's forward
ref            the reference policy's forward
update         the actor's forward, backward and optimizer step
checkpoint     weights and optimizer state are read or written
idle           nothing is needed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from verl_patches.features import settings
from verl_patches.features.measure.step_record import current_record
from verl_patches.features.residency.storages import Resident

NEEDED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "reshard": frozenset({"actor_params", "rollout_weights"}),
        "rollout": frozenset({"rollout_weights", "kv_cache"}),
        "old_log_prob": frozenset({"actor_params"}),
        "ref": frozenset({"ref_params"}),
        "update": frozenset({"actor_params", "actor_grads", "optimizer"}),
        "checkpoint": frozenset({"actor_params", "optimizer"}),
        "start": frozenset(),
        "idle": frozenset(),
    }
)
GROUPS = frozenset().union(*NEEDED.values())


class Residency:
    """Moves groups of tensors so that the device holds what the phase needs, and meters memory by phase.

    Args:
        enabled: asked at every change of phase. While it answers False everything stays on the device.
    """

    def __init__(self, enabled: Callable[[], bool]):
        self._enabled = enabled
        self._groups: dict[str, list[Resident]] = {}
        self._phase = "idle"

    @property
    def phase(self) -> str:
        """The phase that goes on."""
        return self._phase

    def register(self, group: str, resident: Resident) -> None:
        """Add something that is on the device now to `group`.

        Raises:
            ValueError: no phase knows the group.
        """
        if group not in GROUPS:
            raise ValueError(f"no phase needs a group {group!r}; groups are {', '.join(sorted(GROUPS))}")
        self._groups.setdefault(group, []).append(resident)

    def enter(self, phase: str) -> None:
        """End the phase that goes on and begin `phase`: what it does not need leaves first, then what it needs comes.

        The peak of a phase counts from when the unneeded has left. Time spent moving is the stage `offload`.

        Raises:
            ValueError: unknown phase.
        """
        if phase not in NEEDED:
            raise ValueError(f"unknown phase {phase!r}; phases are {', '.join(NEEDED)}")
        self.close()
        needed = NEEDED[phase] if self._enabled() else GROUPS
        with current_record().timed("offload"):
            for group in self._groups.keys() - needed:
                for resident in self._groups[group]:
                    resident.offload()
            torch.npu.empty_cache()
            torch.npu.reset_peak_memory_stats()
            for group in self._groups.keys() & needed:
                for resident in self._groups[group]:
                    resident.onload()
        self._phase = phase

    def close(self) -> None:
        """Record the memory of the phase that goes on; it may go on afterwards."""
        current_record().memory(self._phase, torch.npu.max_memory_allocated(), torch.npu.memory_allocated())


_residency = Residency(lambda: settings.current().residency.enabled)


def process_residency() -> Residency:
    """The one `Residency` of this process: actor, rollout and reference policy share the die."""
    return _residency
