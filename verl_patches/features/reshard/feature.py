"""The feature reshard: its configuration and its switch."""

from __future__ import annotations

from dataclasses import dataclass, field

from overlay import Feature


@dataclass(frozen=True)
class ReshardSettings:
    """Move updated weights to the rollout by a plan of byte ranges instead of gathering whole tensors.

    bucket_bytes bounds the staging memory of a die in each direction. overlap splits it in two, so that packing and
    transfer run at the same time. With dies_per_node, what many dies of a node need enters the node once; 0 means that
    all links are alike.
    """

    enabled: bool = True
    bucket_bytes: int = field(default=64 * 1024 * 1024, metadata={"at_least": 1})
    overlap: bool = False
    dies_per_node: int = field(default=0, metadata={"at_least": 0})


WHOLE_WEIGHTS = Feature(
    name="whole_weights",
    purpose="The rollout samples from whole weights: derived ones follow the others, half-written ones are rejected.",
)

RESHARD = Feature(
    name="reshard",
    purpose="Updated weights reach the rollout by a plan of byte ranges: every die receives what it serves, no more.",
    section="actor_rollout_ref.overlay.reshard",
    settings=ReshardSettings,
)
