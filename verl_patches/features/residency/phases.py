"""The phases of a training step, and the groups of tensors that are on the device in each: a declared state machine.

init           models are built one after the other; vLLM sizes its KV cache by the free memory
reshard        the training weights are read, the rollout weights written
rollout        generation: the KV cache is created only now, after the training state has left
idle           generation is over and the next phase is not known yet
old_log_prob   the actor's forward
ref            the reference policy's forward
values         the critic's forward
update_critic  the critic's forward, backward and optimizer step
update         the actor's forward, backward and optimizer step
checkpoint     weights and optimizer state are read or written
critic_checkpoint  the critic's likewise

A group leaves only when a phase begins that does not need it, and idle leaves everything in place but the KV cache,
whose contents are worthless by then. So a group that the next phase needs never leaves, and nothing is copied out
twice: a phase declares which groups it writes, and a group that no phase has written since it came only gives its
memory back. No phase writes the reference policy's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from verl_patches.features.measure.step_record import current_record
from verl_patches.features.residency.storages import Resident, StorageGroup

GROUPS = (
    "actor_params", "actor_grads", "optimizer", "critic_params", "critic_grads", "critic_optimizer", "ref_params",
    "rollout_weights", "kv_cache",
)  # fmt: skip
"""In the order in which they come to the device: the KV cache last, after everything else that a phase needs."""


@dataclass(frozen=True)
class Phase:
    """A phase.

    Attributes:
        needs: groups that are on the device.
        writes: those of them whose contents change.
        keeps: groups that stay if they are there.
        after: the only phase that it may follow; None means any.
    """

    needs: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    keeps: frozenset[str] = frozenset()
    after: str | None = None


_TRAINING = frozenset({"actor_params", "actor_grads", "optimizer"})
_CRITIC = frozenset({"critic_params", "critic_grads", "critic_optimizer"})

PHASES: Mapping[str, Phase] = MappingProxyType(
    {
        "init": Phase(),
        "reshard": Phase(needs=frozenset({"actor_params", "rollout_weights"}), writes=frozenset({"rollout_weights"})),
        "rollout": Phase(
            needs=frozenset({"rollout_weights", "kv_cache"}), writes=frozenset({"kv_cache"}), after="reshard"
        ),
        "idle": Phase(keeps=frozenset(GROUPS) - {"kv_cache"}),
        "old_log_prob": Phase(needs=frozenset({"actor_params"})),
        "ref": Phase(needs=frozenset({"ref_params"})),
        "values": Phase(needs=frozenset({"critic_params"})),
        "update_critic": Phase(needs=_CRITIC, writes=_CRITIC),
        "update": Phase(needs=_TRAINING, writes=_TRAINING),
        "checkpoint": Phase(needs=_TRAINING - {"actor_grads"}, writes=_TRAINING - {"actor_grads"}),
        "critic_checkpoint": Phase(needs=_CRITIC - {"critic_grads"}, writes=_CRITIC - {"critic_grads"}),
    }
)


class Residency:
    """The offload manager: keeps the groups on the device that the phase needs, and meters memory by phase.

    Args:
        enabled: called at every change of phase. While it returns False, everything stays on the device.
    """

    def __init__(self, enabled: Callable[[], bool]):
        self._enabled = enabled
        self._groups: dict[str, list[Resident]] = {}
        self._phase = "init"
        self._changed: set[str] = set()  # groups that a phase has written since they came

    @property
    def phase(self) -> str:
        """The current phase."""
        return self._phase

    def register(self, group: str, resident: Resident) -> None:
        """Add a resident, which is on the device now, to `group`.

        Raises:
            ValueError: the group is unknown.
        """
        if group not in GROUPS:
            raise ValueError(f"no phase needs a group {group!r}. Groups are {', '.join(GROUPS)}")
        self._groups.setdefault(group, []).append(resident)

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`: groups that it does not need leave before those that it needs come.

        The peak of a phase counts from when the unneeded groups have left. Time spent moving is the stage `offload`,
        and bytes copied are the metrics `residency/device_to_host_bytes` and `residency/host_to_device_bytes`.

        Raises:
            ValueError: the phase is unknown, or may not follow the current one.
        """
        needs, stays = self._residents_of(phase)
        self.close()
        record = current_record()
        leave = [group for group in GROUPS if group not in stays]
        with record.timed("offload"):
            copied_out = sum(resident.offload(group in self._changed) for group, resident in self._of(leave))
            torch.npu.empty_cache()
            torch.npu.reset_peak_memory_stats()
            copied_in = sum(resident.onload() for _, resident in self._of(g for g in GROUPS if g in needs))
        self._changed = (self._changed - set(leave)) | PHASES[phase].writes
        record.count("residency/device_to_host_bytes", copied_out)
        record.count("residency/host_to_device_bytes", copied_in)
        self._phase = phase

    def copy_out(self, groups: Collection[str]) -> Callable[[torch.Tensor], torch.Tensor | None]:
        """Update the host copies of `groups`, which are on the device and stay there; offloading them later copies only
        what is written after this.

        Returns:
            A function from a tensor of the groups to its host copy, which is valid until a phase that writes the group
            ends; None for any other tensor.
        """
        record = current_record()
        kept = [(group, resident) for group, resident in self._of(groups) if isinstance(resident, StorageGroup)]
        with record.timed("offload"):
            copied = sum(resident.copy_out(group in self._changed) for group, resident in kept)
        record.count("residency/device_to_host_bytes", copied)
        self._changed -= set(groups)

        def on_host(tensor: torch.Tensor) -> torch.Tensor | None:
            copies = (resident.host_copy(tensor) for _, resident in kept)
            return next((copy for copy in copies if copy is not None), None)

        return on_host

    def _residents_of(self, phase: str) -> tuple[frozenset[str], frozenset[str]]:
        """Return the groups that must be on the device in `phase`, and those that may be."""
        declared = PHASES.get(phase)
        if declared is None:
            raise ValueError(f"unknown phase {phase!r}. Phases are {', '.join(PHASES)}")
        if declared.after not in (None, self._phase):
            raise ValueError(f"{phase} may only follow {declared.after}, not {self._phase}")
        if not self._enabled():
            return frozenset(GROUPS), frozenset(GROUPS)
        return declared.needs, declared.needs | declared.keeps

    def _of(self, groups: Iterable[str]) -> Iterator[tuple[str, Resident]]:
        for group in groups:
            yield from ((group, resident) for resident in self._groups.get(group, []))

    def close(self) -> None:
        """Record the memory of the current phase, which may continue afterwards.

        Unmapped bytes do not count; they were unmapped when the peak was reset, or at its last rise.
        """
        unmapped = sum(resident.unmapped_bytes for _, resident in self._of(GROUPS))
        peak, now = torch.npu.max_memory_allocated(), torch.npu.memory_allocated()
        current_record().memory(self._phase, peak - unmapped, now - unmapped)
