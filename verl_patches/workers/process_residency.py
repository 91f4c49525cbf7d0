"""The residency of a worker's process."""

from verl_patches.features.residency.feature import RESIDENCY
from verl_patches.features.residency.phases import Residency
from verl_patches.features.residency.sleeping import SleepingEngine

_residency = Residency(RESIDENCY.is_in_force)
_sleeping = SleepingEngine()
_residency.register("kv_cache", _sleeping)


def process_residency() -> Residency:
    """The one `Residency` of this process: actor, rollout and reference policy share the die."""
    return _residency


def sleeping_engine() -> SleepingEngine:
    """The engine of this process where it sleeps by vLLM-Ascend's sleep mode, as under FSDP."""
    return _sleeping
