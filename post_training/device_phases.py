"""The most device memory of each phase of a step, with what the die's other processes hold meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes of one phase on one die: the most while it lasted, and what was left at its end."""

    peak: int
    end: int

    def __or__(self, other: PhaseMemory) -> PhaseMemory:
        return PhaseMemory(max(self.peak, other.peak), max(self.end, other.end))


@dataclass
class PhaseMeter:
    """Meters one phase of a process after the other.

    A phase has what this process's tensors take at most, and what was on the die beside its allocator's memory when the
    phase began. Another process must therefore not take more while it lasts: processes that share a die take turns.
    """

    phase: str | None = None
    _beside: int = 0
    _found: dict[str, PhaseMemory] = field(default_factory=dict)

    def begin(self, phase: str) -> None:
        """End the phase that goes on, if it is another one, and begin `phase`. Resets torch's own peaks."""
        if phase == self.phase:
            return
        self.end()
        self.phase = phase
        torch.npu.reset_peak_memory_stats()
        self._beside = used_bytes() - torch.npu.memory_reserved()

    def end(self) -> None:
        """End the phase that goes on, if there is one."""
        if self.phase is not None:
            peak, left = torch.npu.max_memory_allocated(), torch.npu.memory_allocated()
            self.keep(self.phase, PhaseMemory(self._beside + peak, self._beside + left))
        self.phase = None

    def keep(self, phase: str, memory: PhaseMemory) -> None:
        """Take in a phase; of several of one name the larger numbers count."""
        known = self._found.get(phase)
        self._found[phase] = memory if known is None else known | memory

    def take(self) -> dict[str, PhaseMemory]:
        """The phases that ended since the last call."""
        found, self._found = self._found, {}
        return found


def used_bytes() -> int:
    """What all processes together hold of this process's die."""
    free, total = torch.npu.mem_get_info()
    return total - free
