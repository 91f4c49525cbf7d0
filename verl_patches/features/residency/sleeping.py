"""A resident for an engine in vLLM-Ascend's own sleep mode, so that residency meters its memory."""

from __future__ import annotations


class SleepingEngine:
    """The memory pool of the engine, which has no memory while it sleeps although torch's counters still count it.

    verl puts the engine to sleep and wakes it; residency does not move it.
    """

    def __init__(self) -> None:
        self.asleep = False

    @property
    def unmapped_bytes(self) -> int:
        """Bytes of the pool while the engine sleeps."""
        if not self.asleep:
            return 0
        from vllm_ascend.device_allocator.camem import CaMemAllocator

        return int(CaMemAllocator.get_instance().get_current_usage())

    def onload(self) -> int:
        """Do nothing: verl wakes the engine."""
        return 0

    def offload(self, changed: bool = True) -> int:
        """Do nothing: verl puts the engine to sleep."""
        return 0
