"""The residency of a worker's process."""

from verl_patches.features.residency.feature import RESIDENCY
from verl_patches.features.residency.phases import Residency

_residency = Residency(RESIDENCY.is_in_force)


def process_residency() -> Residency:
    """The one `Residency` of this process: actor, rollout and reference policy share the die."""
    return _residency
