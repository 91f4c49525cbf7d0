"""verl's batches count what they are serialized to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.measure.feature import MEASURE

if TYPE_CHECKING:
    from verl import DataProto


@wrap(
    "verl.protocol:DataProto.__getstate__",
    feature=MEASURE,
    evidence="executed",
    why="how many bytes the driver hands to workers decides how late the last of them starts, and nothing says it",
    upstream="not forwarded: part of this project's features",
    remove_when="never: it is this project's own record",
)
def getstate(upstream: Callable[..., tuple[Any, ...]], self: DataProto) -> tuple[Any, ...]:
    from verl_patches.features.measure import serialized

    state = upstream(self)
    serialized.add(len(state[0]))
    return state
