"""Expert choices that one process recorded in a step, and their comparison over all ranks at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from post_training.mismatch.points import split
from post_training.mismatch.recording import NO_TOKEN
from post_training.process_context import process_context
from post_training.report.metrics import EXPERT_SETS_COMPARED, EXPERT_SETS_DIFFER, EXPERT_TIES_DIFFER
from verl_patches.features.expert_sets.keys import drawn, layer_keys, set_hashes

Records = NDArray[np.uint64]
"""[records, 2 or 4]: the key of a token in a layer, the hash of the experts that it was sent to, and for training its
place (`Places`)."""
Places = NDArray[np.uint64]
"""[records, 2]: the key of a whole sequence, and a token's position in it above 32 bits of a layer's number."""
_LAYER_BITS = np.uint64(32)
_LAYER = np.uint64(2**32 - 1)


class ChoiceRecorder:
    """Receives from hooks on routers the experts of the drawn tokens of the running forward.

    Attributes:
        rows: int64 [tokens] on the host, the index of each row of the forward among the keys, or `NO_TOKEN` for rows
            that are not drawn; None between forwards, when hooks record nothing.
    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self._keys: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._found: list[Records] = []

    def begin(self, keys: NDArray[np.uint64], drawn: NDArray[np.bool_]) -> bool:
        """Begin a forward whose rows have these keys; return whether any of them is drawn."""
        self._keys = keys
        self.rows = torch.from_numpy(np.where(drawn, np.arange(len(keys)), NO_TOKEN)) if drawn.any() else None
        return self.rows is not None

    def end(self) -> None:
        """End the forward."""
        self.rows = None

    def record(self, point: str, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep the chosen experts `values` [tokens, experts per token] of `rows`."""
        layer, _ = split(point)
        assert layer is not None
        kept = (rows != NO_TOKEN).nonzero().flatten()
        if not len(kept):
            return
        # Copied at once: later operators of the model may reuse the memory.
        experts = values.detach()[kept.to(values.device)].cpu().numpy()
        named = rows[kept].numpy()
        keys = layer_keys(self._keys[named], layer)
        self._found.append(np.column_stack([keys, set_hashes(experts), self._places(layer, named)]))

    def take(self) -> Records:
        """Return the records since the last call; each key once, with its first choice."""
        found = np.concatenate(self._found or [np.empty((0, 4), np.uint64)])
        self._found = []
        return found[np.unique(found[:, 0], return_index=True)[1]]

    def _places(self, layer: int, rows: NDArray[np.int64]) -> Places:
        """Return the columns after a record's key and hash; here there are none."""
        return np.empty((len(rows), 0), np.uint64)


class TrainingChoiceRecorder(ChoiceRecorder):
    """Records choices in training and, for float32 models, ties: choices that rounding decides, on either side.

    A token that is sent to other experts changes the input of every later layer and token of its sequence, so a tie may
    explain differences after it, and no others.

    Attributes:
        records_ties: whether ties are recorded; the same on all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records_ties = False
        self._row_places: Places = np.empty((0, 2), np.uint64)
        self._ties: list[Places] = []

    def begin_packed(self, sequences: Sequence[NDArray[np.uint64]], padding: Sequence[int], share: float) -> bool:
        """Begin a forward of packed sequences with these keys, each followed by its number of padding rows; return
        whether any row is drawn."""
        keys, places, tokens = [], [], []
        for own, gap in zip(sequences, padding, strict=True):
            positions = np.arange(len(own) + gap, dtype=np.uint64) << _LAYER_BITS
            places.append(np.stack([np.full_like(positions, own[-1:].sum()), positions], axis=1))
            keys.append(np.concatenate([own, np.zeros(gap, np.uint64)]))
            tokens.append(np.arange(len(positions)) < len(own))
        self._row_places = np.concatenate(places)
        packed = np.concatenate(keys)
        return self.begin(packed, drawn(packed, share) & np.concatenate(tokens))

    def record_ties(self, layer: int, tied: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep the tokens of `rows` that the layer's router may send elsewhere by rounding; `tied`: bool [tokens]."""
        self._ties.append(self._places(layer, rows[tied.cpu() & (rows != NO_TOKEN)].numpy()))

    def take_ties(self) -> Places:
        """Return all ties since the last call."""
        ties, self._ties = np.concatenate([np.empty((0, 2), np.uint64), *self._ties]), []
        return ties

    def _places(self, layer: int, rows: NDArray[np.int64]) -> Places:
        return self._row_places[rows] + np.array([0, layer], np.uint64)


@dataclass
class StepChoices:
    """The recorders of this process.

    Attributes:
        rollout: records the choices of the rollout.
        training: records the choices of training.
        watched: whether this run has routers on both sides to compare.
        of_pass: makes the context of a micro batch's forward while a pass of training is recorded.
    """

    rollout: ChoiceRecorder = field(default_factory=ChoiceRecorder)
    training: TrainingChoiceRecorder = field(default_factory=TrainingChoiceRecorder)
    watched: bool = False
    of_pass: Callable[..., AbstractContextManager[None]] | None = None

    def metrics(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Compare the step's choices over the ranks of `group` and begin anew; empty if nothing can be compared.

        Collective if routers are watched: two all-gathers and one all-reduce, and two further all-gathers for float32,
        all on the device.
        """
        if not self.watched:
            return {}
        mine, of_rollout = self.training.take(), gathered(self.rollout.take(), group)
        compared, differing = matched(of_rollout, mine)
        with_ties = self.training.records_ties
        tied = behind_a_tie(differing[:, 2:], gathered(self.training.take_ties(), group)) if with_ties else 0
        counts = torch.tensor([compared, len(differing) - tied, tied], dtype=torch.float32, device="npu")
        dist.all_reduce(counts, group=group)
        compared, certain, tied = counts.tolist()
        if not compared:
            return {}
        metrics = {EXPERT_SETS_COMPARED: compared, EXPERT_SETS_DIFFER: certain / compared}
        return metrics | ({EXPERT_TIES_DIFFER: tied / compared} if with_ties else {})


def gathered(rows: NDArray[np.uint64], group: dist.ProcessGroup | None = None) -> NDArray[np.uint64]:
    """Gather the first two columns of all ranks' rows. Collective: one all-gather of their numbers, one of the rows."""
    ranks = dist.get_world_size(group)
    count = torch.tensor([len(rows)], device="npu")
    counts = torch.empty(ranks, dtype=count.dtype, device="npu")
    dist.all_gather_into_tensor(counts, count, group=group)
    sizes = counts.tolist()
    most = max(max(sizes), 1)
    padded = np.zeros((most, 2), np.uint64)
    padded[: len(rows)] = rows[:, :2]
    sent = torch.from_numpy(padded.view(np.int64)).npu()
    received = torch.empty((ranks * most, 2), dtype=sent.dtype, device="npu")
    dist.all_gather_into_tensor(received, sent, group=group)
    found = received.cpu().numpy().view(np.uint64).reshape(ranks, most, 2)
    return np.concatenate([part[:size] for part, size in zip(found, sizes, strict=True)])


def matched(rollout: Records, training: Records) -> tuple[int, Records]:
    """Return how many keys both sides have, and training's records of those whose expert sets differ."""
    keys, first = np.unique(rollout[:, 0], return_index=True)
    if not len(keys):
        return 0, training[:0]
    places = np.searchsorted(keys, training[:, 0]).clip(max=len(keys) - 1)
    both = keys[places] == training[:, 0]
    differ = rollout[first[places], 1] != training[:, 1]
    return int(both.sum()), training[both & differ]


def behind_a_tie(places: Places, ties: Places) -> int:
    """Count the `places` that a tie may explain: a tie in the same sequence, no later in it, and in no later layer."""
    found = 0
    for sequence, place in places:
        of_sequence = ties[ties[:, 0] == sequence, 1]
        earlier = of_sequence >> _LAYER_BITS <= place >> _LAYER_BITS
        found += bool((earlier & (of_sequence & _LAYER <= place & _LAYER)).any())
    return found


def process_choices() -> StepChoices:
    """Return the recorders of this process."""
    return process_context().of(StepChoices)
