"""An engine that sleeps by vLLM-Ascend's own sleep mode, as residency meters it."""

from __future__ import annotations


class SleepingEngine:
    """The memory pool of the engine. Asleep, there is no memory behind it, and torch's counters go on counting it.

    verl puts the engine to sleep and wakes it; residency moves nothing of it.
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
        """Nothing: verl wakes the engine."""
        return 0

    def offload(self, changed: bool = True) -> int:
        """Nothing: verl puts it to sleep."""
        return 0
