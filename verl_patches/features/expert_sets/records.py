"""The choices of experts that one process saw in a step, and their comparison over all ranks at its end."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from post_training.mismatch.points import split
from post_training.mismatch.recording import NO_TOKEN
from post_training.report.metrics import EXPERT_SETS_COMPARED, EXPERT_SETS_DIFFER
from verl_patches.features.expert_sets.keys import layer_keys, set_hashes

Pairs = NDArray[np.uint64]
"""[records, 2]: the key of a token in a layer, and the hash of the experts that it was sent to."""


class ChoiceRecorder:
    """What hooks on routers tell: the experts of the drawn tokens of the forward that runs.

    rows: int64 [tokens] on the host, the place of each row of the forward among `keys` or `NO_TOKEN`; None between two
    forwards, where hooks record nothing.
    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self._keys: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._found: list[Pairs] = []

    def begin(self, keys: NDArray[np.uint64], drawn: NDArray[np.bool_]) -> bool:
        """The rows of the next forward have these keys; returns whether any of them is drawn."""
        self._keys = keys
        self.rows = torch.from_numpy(np.where(drawn, np.arange(len(keys)), NO_TOKEN)) if drawn.any() else None
        return self.rows is not None

    def end(self) -> None:
        """The forward is over."""
        self.rows = None

    def record(self, point: str, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep the chosen experts `values` [tokens, experts per token] of `rows`."""
        layer, _ = split(point)
        assert layer is not None
        kept = (rows != NO_TOKEN).nonzero().flatten()
        if not len(kept):
            return
        # Now: what follows in the model may give the memory away.
        experts = values.detach()[kept.to(values.device)].cpu().numpy()
        keys = layer_keys(self._keys[rows[kept].numpy()], layer)
        self._found.append(np.stack([keys, set_hashes(experts)], axis=1))

    def take(self) -> Pairs:
        """Everything that was recorded since the last call; each key once, with its first choice."""
        pairs = np.concatenate([np.empty((0, 2), np.uint64), *self._found])
        self._found = []
        return pairs[np.unique(pairs[:, 0], return_index=True)[1]]


@dataclass
class StepChoices:
    """The recorders of this process. `watched`: whether this run has routers on both sides to compare."""

    rollout: ChoiceRecorder = field(default_factory=ChoiceRecorder)
    training: ChoiceRecorder = field(default_factory=ChoiceRecorder)
    watched: bool = False

    def metrics(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Compare the step's choices over the ranks of `group` and begin anew; empty where nothing can be compared.

        Collective where routers are watched: two all-gathers and one all-reduce, all on the device.
        """
        if not self.watched:
            return {}
        mine, of_rollout = self.training.take(), gathered(self.rollout.take(), group)
        counts = torch.tensor(matched(of_rollout, mine), dtype=torch.float32, device="npu")
        dist.all_reduce(counts, group=group)
        compared, differing = counts.tolist()
        return {EXPERT_SETS_COMPARED: compared, EXPERT_SETS_DIFFER: differing / compared} if compared else {}


def gathered(pairs: Pairs, group: dist.ProcessGroup | None = None) -> Pairs:
    """The pairs of all ranks. Collective: one all-gather of how many each has, and one of the pairs."""
    ranks = dist.get_world_size(group)
    count = torch.tensor([len(pairs)], device="npu")
    counts = torch.empty(ranks, dtype=count.dtype, device="npu")
    dist.all_gather_into_tensor(counts, count, group=group)
    sizes = counts.tolist()
    most = max(max(sizes), 1)
    padded = np.zeros((most, 2), np.uint64)
    padded[: len(pairs)] = pairs
    sent = torch.from_numpy(padded.view(np.int64)).npu()
    received = torch.empty((ranks * most, 2), dtype=sent.dtype, device="npu")
    dist.all_gather_into_tensor(received, sent, group=group)
    found = received.cpu().numpy().view(np.uint64).reshape(ranks, most, 2)
    return np.concatenate([rows[:size] for rows, size in zip(found, sizes, strict=True)])


def matched(rollout: Pairs, training: Pairs) -> tuple[int, int]:
    """How many keys both have, and for how many of them the sets differ."""
    keys, first = np.unique(rollout[:, 0], return_index=True)
    if not len(keys):
        return 0, 0
    places = np.searchsorted(keys, training[:, 0]).clip(max=len(keys) - 1)
    both = keys[places] == training[:, 0]
    differ = rollout[first[places], 1] != training[:, 1]
    return int(both.sum()), int((both & differ).sum())


_choices = StepChoices()


def process_choices() -> StepChoices:
    """Those of this process."""
    return _choices
