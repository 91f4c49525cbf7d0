"""The experts that the rollout gives to one router of the training model, and how often the router uses them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from post_training.report.metrics import (
    EXPERT_BYTES,
    EXPERT_SETS_COMPARED,
    EXPERT_SETS_DIFFER,
    EXPERT_SETS_REPLACED,
)


@dataclass(frozen=True)
class Rows:
    """The experts that the rollout chose for the rows of a forward, in the order in which the model computes the rows.

    Attributes:
        experts: int64 [rows, layers, experts per token].
        known: bool [rows]; False for padding, and for the last token of an answer, which the rollout did not compute.
    """

    experts: torch.Tensor
    known: torch.Tensor

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's experts, and for which rows they are known."""
        return self.experts[:, layer], self.known


class Tally:
    """Counts of a step in tokens x layers: compared, sent to other experts than in the rollout, preferring others.

    Attributes:
        open: whether passes are counted. Training and rollout have the same weights only until the first update after
            the rollout got them.
    """

    def __init__(self) -> None:
        self.open = True
        self._counts: list[torch.Tensor] = []

    def add(self, known: torch.Tensor, used_others: torch.Tensor, preferred_others: torch.Tensor) -> None:
        """Count the rows of a router, bool [rows] each. Everything stays on the device."""
        if self.open:
            counted = [known.sum(), (used_others & known).sum(), (preferred_others & known).sum()]
            self._counts.append(torch.stack(counted))

    def take(self, device: Any) -> torch.Tensor:
        """Return this rank's three counts and reset them."""
        counts, self._counts = self._counts, []
        return torch.stack(counts).sum(0) if counts else torch.zeros(3, dtype=torch.int64, device=device)


def metrics_of(counts: Sequence[int]) -> dict[str, float]:
    """Return a step's metrics from `Tally`'s counts, summed over all ranks; empty if nothing was compared."""
    compared, differ, replaced = counts
    if not compared:
        return {}
    return {
        EXPERT_SETS_COMPARED: float(compared),
        EXPERT_SETS_DIFFER: differ / compared,
        EXPERT_SETS_REPLACED: replaced / compared,
    }


def bytes_metric(total: float) -> dict[str, float]:
    """Return the metric for the bytes that the expert numbers of a step's samples take."""
    return {EXPERT_BYTES: total}


class GivenExperts:
    """Replaces the `router_replay` of one Megatron-core router; serves FSDP2's routers as well.

    Args:
        layer: number of the decoder layer in the whole model, from 0.
        replays: whether the given experts are used; if not, they are only compared.
        in_order: whether several micro batches may be in flight at once, as with pipeline stages. Recomputation then
            asks for each of them once, in the order of their forwards; otherwise for the last one.
        tally: the engine's; None counts nothing.
    """

    router_replay_action = None
    """verl's engine reads this from Megatron-core's routers, and leaves routers alone that have none."""

    def __init__(self, layer: int, replays: bool, in_order: bool, tally: Tally | None = None) -> None:
        self.layer, self.replays = layer, replays
        self._in_order, self._tally = in_order, tally
        self._running: tuple[torch.Tensor, torch.Tensor] | None = None
        self._later: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._preferred_others: torch.Tensor | None = None

    def begin(self, rows: Rows, has_backward: bool) -> None:
        """Begin the forward of a micro batch."""
        self._running = rows.of_layer(self.layer)
        if has_backward:
            if not self._in_order:
                self._later.clear()
            self._later.append(self._running)

    def end(self) -> None:
        """End that forward. Calls until the next `begin` are recomputation."""
        self._running = None

    def release(self) -> None:
        """Drop the experts of a batch whose micro batches are all done."""
        self._running = None
        self._later.clear()

    def choose(self, native: torch.Tensor, experts: int) -> torch.Tensor:
        """Return the experts to use, like `native` int64 [rows, experts per token]; a layer has `experts` of them."""
        given = self._given()
        if given is None:
            return native
        chosen, known = given
        if chosen.shape != native.shape:
            raise ValueError(
                f"routing replay: the router of layer {self.layer} has {tuple(native.shape)} choices, but the rollout "
                f"gave {tuple(chosen.shape)}. Rows of the micro batch and of the router differ."
            )
        if self._running is not None and self._tally is not None:
            self._preferred_others = sets_differ(native, chosen, experts)
        return torch.where(known[:, None], chosen, native) if self.replays else native

    def count(self, used: torch.Tensor) -> None:
        """Count the experts that a forward has used: bool [rows, experts]."""
        if self._running is None or self._tally is None:
            return
        chosen, known = self._running
        others = (used != one_hot(chosen, used.shape[1])).any(dim=1)
        preferred, self._preferred_others = self._preferred_others, None
        self._tally.add(known, others, others if preferred is None else preferred)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: Any = None,
        group_topk: Any = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose for Megatron-core, which calls its `router_replay` by this name: scores and numbers of the experts."""
        values, native = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = self.choose(native, scores.shape[1])
        return (values, native) if chosen is native else (scores.gather(1, chosen), chosen)

    def _given(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self._running is not None:
            return self._running
        if not self._later or not self.replays:
            return None
        return self._later.popleft() if self._in_order else self._later[0]


def one_hot(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the experts of each row, [rows, experts per token], as bool [rows, experts]."""
    rows = torch.zeros(chosen.shape[0], experts, dtype=torch.int32, device=chosen.device)
    return rows.scatter(1, chosen, 1).bool()


def sets_differ(first: torch.Tensor, second: torch.Tensor, experts: int) -> torch.Tensor:
    """Return for each row whether two choices are different sets of experts: bool [rows]."""
    return (one_hot(first, experts) != one_hot(second, experts)).any(dim=1)
