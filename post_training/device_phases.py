"""Peak device memory of each phase of a step, including what other processes on the die hold meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on one die during one phase: the peak, and what was still held at its end."""

    peak: int
    end: int

    def __or__(self, other: PhaseMemory) -> PhaseMemory:
        return PhaseMemory(max(self.peak, other.peak), max(self.end, other.end))


@dataclass
class PhaseMeter:
    """Measures the phases of a process one after another.

    A phase counts the peak of this process's tensors plus the memory that was in use outside its allocator when the
    phase began. No other process may allocate more while the phase lasts: processes that share a die take turns.
    """

    phase: str | None = None
    _beside: int = 0
    _found: dict[str, PhaseMemory] = field(default_factory=dict)

    def begin(self, phase: str) -> None:
        """End the current phase, if it is another one, and begin `phase`. Resets torch's peak statistics."""
        if phase == self.phase:
            return
        self.end()
        self.phase = phase
        torch.npu.reset_peak_memory_stats()
        self._beside = used_bytes() - torch.npu.memory_reserved()

    def end(self) -> None:
        """End the current phase, if there is one."""
        if self.phase is not None:
            peak, left = torch.npu.max_memory_allocated(), torch.npu.memory_allocated()
            self.keep(self.phase, PhaseMemory(self._beside + peak, self._beside + left))
        self.phase = None

    def keep(self, phase: str, memory: PhaseMemory) -> None:
        """Record a phase; if it was recorded before, keep the larger numbers."""
        known = self._found.get(phase)
        self._found[phase] = memory if known is None else known | memory

    def take(self) -> dict[str, PhaseMemory]:
        """Return the phases that ended since the last call."""
        found, self._found = self._found, {}
        return found


def used_bytes() -> int:
    """Return the bytes that all processes together hold on this process's die."""
    free, total = torch.npu.mem_get_info()
    return total - free
