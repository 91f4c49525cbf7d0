"""The residency of a worker's process."""

from verl_patches.features import settings
from verl_patches.features.residency.phases import Residency

_residency = Residency(lambda: settings.current().residency.enabled)


def process_residency() -> Residency:
    """The one `Residency` of this process: actor, rollout and reference policy share the die."""
    return _residency
