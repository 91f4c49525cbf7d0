"""The feature reshard: its configuration and its switch."""

from __future__ import annotations

from dataclasses import dataclass, field

from overlay import Feature


@dataclass(frozen=True)
class ReshardSettings:
    """Move updated weights to the rollout by a plan of byte ranges instead of gathering whole tensors.

    bucket_bytes is the upper bound of a die's staging memory in each direction. overlap splits it in two, so that
    packing and transfer run at the same time. With dies_per_node, the number of dies in a node, a region that several
    dies of a node need enters the node once and is forwarded inside it; 0 treats all links alike.
    """

    enabled: bool = True
    bucket_bytes: int = field(default=64 * 1024 * 1024, metadata={"at_least": 1})
    overlap: bool = False
    dies_per_node: int = field(default=0, metadata={"at_least": 0})


WHOLE_WEIGHTS = Feature(
    name="whole_weights",
    purpose="The rollout samples only from complete weights: derived ones are refreshed, partly written ones are "
    "rejected.",
)

RESHARD = Feature(
    name="reshard",
    purpose="Updated weights reach the rollout by a plan of byte ranges: every die receives only the weights it "
    "serves.",
    section="actor_rollout_ref.overlay.reshard",
    settings=ReshardSettings,
)
