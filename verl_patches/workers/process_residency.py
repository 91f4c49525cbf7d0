"""The offload manager of a worker's process."""

from post_training.process_context import process_context
from verl_patches.features.residency.feature import RESIDENCY
from verl_patches.features.residency.phases import Residency
from verl_patches.features.residency.sleeping import SleepingEngine


def process_residency() -> Residency:
    """Return the only `Residency` of this process: actor, rollout and reference policy share the die."""
    residency = process_context().find(Residency)
    if residency is None:
        residency = process_context().keep(Residency(RESIDENCY.is_active))
        residency.register("kv_cache", sleeping_engine())
    return residency


def sleeping_engine() -> SleepingEngine:
    """Return the resident for this process's engine in vLLM-Ascend's sleep mode, which is used under FSDP."""
    return process_context().of(SleepingEngine)
