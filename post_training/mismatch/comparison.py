"""Compares two dumps of the same tokens: the first point at which they diverge, by how much, and differing experts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from post_training.mismatch import points
from post_training.mismatch.dumps import Captured, Dump, TokenSequence
from post_training.mismatch.points import in_order, split

_PAIRS = 10
"""Number of expert swaps that are reported, the most frequent ones."""


class ComparisonError(ValueError):
    """Two dumps cannot be compared; the message is one sentence."""


@dataclass(frozen=True)
class Tolerance:
    """Largest differences that count as equal.

    Attributes:
        relative: norm of the difference of a row over the norm of training's row.
        log_prob: absolute difference of log-probs.
        swapped: share of the tokens for which a layer may choose other experts because of near ties.
    """

    relative: float
    log_prob: float
    swapped: float


TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(1e-4, 1e-3, 0.01),
    "float16": Tolerance(1e-2, 0.1, 0.3),
    "bfloat16": Tolerance(5e-2, 0.5, 0.5),
}
"""Default tolerances, by the coarser dtype of the two dumps."""


@dataclass(frozen=True)
class Swap:
    """Number of tokens for which the rollout chose expert `rollout` instead of training's expert `training`."""

    training: int
    rollout: int
    tokens: int


@dataclass(frozen=True)
class PointResult:
    """Result of comparing one point.

    Attributes:
        tokens: number of tokens that both sides have.
        judged: number of these tokens without an earlier swap of experts; only these are checked.
        worst, median: differences of the judged tokens: relative, absolute for log-probs, and for experts the share of
            tokens with other experts.
        worst_of_all: worst difference of all tokens.
        diverges: `worst` is above `tolerance`, or NaN.
        at: sequence and position of the worst token, from 0; for experts of the first token with other ones.
        where: description of the tokens that diverge.
        experts: at the output of experts, those that explain which tokens diverge.
        swaps: at a choice of experts, the most frequent ones.
    """

    point: str
    tokens: int
    judged: int
    worst: float
    median: float
    worst_of_all: float
    tolerance: float
    at: tuple[int, int] | None = None
    where: str = ""
    experts: tuple[int, ...] = ()
    swaps: tuple[Swap, ...] = ()

    @property
    def diverges(self) -> bool:
        return self.worst > self.tolerance or math.isnan(self.worst)

    @property
    def layer(self) -> int | None:
        return split(self.point)[0]

    @property
    def part(self) -> str:
        return split(self.point)[1]


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison.

    Attributes:
        dtype: the coarser one of the two dumps.
        tokens: number of tokens.
        swapped: number of tokens for which any layer chose other experts.
        results: all points that both sides have, in the order of computation.
        one_sided: points that only one side has.
        replicas: by side and point, the largest relative difference of rows that ranks should have in common.
    """

    dtype: str
    architecture: str
    tolerance: Tolerance
    tokens: int
    swapped: int
    results: tuple[PointResult, ...]
    one_sided: tuple[str, ...]
    replicas: Mapping[str, float]

    @property
    def first(self) -> PointResult | None:
        """The first point at which the two sides diverge."""
        return next((each for each in self.results if each.diverges), None)

    def result(self, point: str) -> PointResult | None:
        """Return the result of a point; None unless both sides have it."""
        return next((each for each in self.results if each.point == point), None)


def compare(rollout: Dump, training: Dump, tolerance: Tolerance | None = None) -> Comparison:
    """Compare every point of the rollout's dump with training's.

    After a layer has chosen other experts for a token, the token takes another path, and later tokens of its sequence
    see it through attention. As long as there are few enough such swaps to be near ties, they are reported, and these
    tokens are not checked after that layer.

    Args:
        rollout: the rollout's dump.
        training: training's dump.
        tolerance: by default the one for the coarser dtype.

    Raises:
        ComparisonError: the dumps have different tokens or models, or are of the same side.
    """
    _check_comparable(rollout, training)
    dtype = max((rollout.header.dtype, training.header.dtype), key=list(TOLERANCES).index)
    tolerance = tolerance or TOLERANCES[dtype]
    tokens = _Tokens(training.sequences)
    shared = rollout.points.keys() & training.points.keys()
    results = []
    for point in in_order(set(shared)):
        pair = _aligned(rollout.points[point], training.points[point], point)
        if split(point)[1] == points.EXPERTS:
            results.append(_compared_choices(point, pair, tokens, tolerance))
        else:
            results.append(_compared_values(point, pair, tokens, tolerance))
            if results[-1].diverges and results[-1].part == points.MLP:
                results[-1] = _with_experts(results[-1], pair, training, tokens)
    if not results:
        raise ComparisonError("the two dumps have no point in common. Write them with the same version")
    both = (rollout.header, training.header)
    replicas = {f"{each.side}: {name}": by for each in both for name, by in each.replicas.items()}
    one_sided = in_order(set(rollout.points.keys() ^ training.points.keys()))
    return Comparison(
        dtype, training.header.architecture, tolerance, tokens.count, int(tokens.swapped.sum()), tuple(results),
        tuple(one_sided), replicas,
    )  # fmt: skip


def _check_comparable(rollout: Dump, training: Dump) -> None:
    for dump, side in ((rollout, "rollout"), (training, "training")):
        if dump.header.side != side:
            raise ComparisonError(f"the dump for {side} was made by {dump.header.side}. Pass one of each")
        if dump.header.dtype not in TOLERANCES:
            raise ComparisonError(f"the dump of {side} is in {dump.header.dtype}. Known are {', '.join(TOLERANCES)}")
    one, other = rollout.header, training.header
    if (one.architecture, one.layers) != (other.architecture, other.layers):
        raise ComparisonError(
            f"the rollout's dump is of {one.architecture} with {one.layers} layers, but training's of "
            f"{other.architecture} with {other.layers}. Dump the same model"
        )
    if len(rollout.sequences) != len(training.sequences):
        raise ComparisonError(
            f"the rollout's dump has {len(rollout.sequences)} sequences, but training's {len(training.sequences)}. "
            "Dump the same tokens"
        )
    for number, pair in enumerate(zip(rollout.sequences, training.sequences, strict=True), 1):
        if pair[0] != pair[1]:
            raise ComparisonError(f"sequence {number} has different tokens in the two dumps. Dump the same tokens")


class _Tokens:
    """Positions of the tokens, and the expert swaps so far.

    Attributes:
        count: number of tokens in all sequences.
        swapped: bool [tokens], tokens whose experts were swapped in any layer so far.
        behind: bool [tokens], tokens with a swap in an earlier layer, their own or that of an earlier token of their
            sequence.
    """

    def __init__(self, sequences: tuple[TokenSequence, ...]) -> None:
        lengths = [len(each.tokens) for each in sequences]
        self.count = sum(lengths)
        self.sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        self.position = torch.cat([torch.arange(length) for length in lengths])
        prompts = torch.tensor([len(each.prompt) for each in sequences])
        self.decoded = self.position >= prompts[self.sequence]
        self.swapped = torch.zeros(self.count, dtype=torch.bool)
        self.behind = self.swapped.clone()
        self._layer = -1

    def judged(self, point: str, rows: torch.Tensor) -> torch.Tensor:
        """Return which of the rows are judged at a point: bool [rows]."""
        layer = split(point)[0]
        if layer != self._layer:  # swaps of the previous layer now affect later tokens through attention
            self._layer = -1 if layer is None else layer
            for sequence in self.sequence[self.swapped].unique():
                mine = self.sequence == sequence
                self.behind |= mine & (self.position >= self.position[mine & self.swapped].min())
        return ~(self.behind | self.swapped)[rows]

    def place(self, row: int) -> tuple[int, int]:
        return int(self.sequence[row]), int(self.position[row])


@dataclass(frozen=True)
class _Pair:
    """The rows that both sides have, int64 [rows], and both sides' values for them, [rows, width]."""

    rows: torch.Tensor
    rollout: torch.Tensor
    training: torch.Tensor


def _aligned(rollout: Captured, training: Captured, point: str) -> _Pair:
    if rollout.values.shape[1] != training.values.shape[1]:
        raise ComparisonError(
            f"{point} is {rollout.values.shape[1]} wide in the rollout, but {training.values.shape[1]} in training. "
            "Dump the same model"
        )
    both = rollout.rows[torch.isin(rollout.rows, training.rows)]
    theirs, ours = torch.searchsorted(rollout.rows, both), torch.searchsorted(training.rows, both)
    return _Pair(both, rollout.values[theirs], training.values[ours])


def _differences(point: str, pair: _Pair) -> torch.Tensor:
    """Return the difference of each row, float64 [rows]: relative, for log-probs absolute."""
    rollout, training = pair.rollout.double(), pair.training.double()
    if point == points.LOG_PROBS:
        return (rollout - training).abs().amax(dim=1)
    scale = training.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return (rollout - training).norm(dim=1) / scale


def _compared_values(point: str, pair: _Pair, tokens: _Tokens, tolerance: Tolerance) -> PointResult:
    allowed = tolerance.log_prob if point == points.LOG_PROBS else tolerance.relative
    differences, judged = _differences(point, pair), tokens.judged(point, pair.rows)
    if not len(pair.rows):
        return PointResult(point, 0, 0, 0.0, 0.0, 0.0, allowed)
    counted = differences[judged]
    found = PointResult(
        point,
        tokens=len(pair.rows),
        judged=len(counted),
        worst=float(counted.max()) if len(counted) else 0.0,
        median=float(counted.median()) if len(counted) else 0.0,
        worst_of_all=float(differences.max()),
        tolerance=allowed,
    )
    if not found.diverges:
        return found
    worst = pair.rows[judged][int(counted.argmax())]
    diverging = pair.rows[judged & ~(differences <= allowed)]
    return replace(found, at=tokens.place(int(worst)), where=_where(diverging, pair.rows[judged], tokens))


def _where(diverging: torch.Tensor, judged: torch.Tensor, tokens: _Tokens) -> str:
    """Describe the tokens that diverge in phrases that distinguish causes."""

    def are(expected: torch.Tensor) -> bool:
        return bool(expected.any()) and torch.equal(diverging, judged[expected])

    later, decoded = tokens.position[judged] > 0, tokens.decoded[judged]
    if len(diverging) == len(judged):
        return "every token"
    if are(later):
        return "every token but the first of each sequence"
    if are(decoded):
        return "every decoded token and no token of a prompt"
    if are(~decoded):
        return "every token of a prompt and no decoded one"
    return f"{len(diverging)} of {len(judged)} tokens"


def _compared_choices(point: str, pair: _Pair, tokens: _Tokens, tolerance: Tolerance) -> PointResult:
    judged = tokens.judged(point, pair.rows)
    rollout, training = pair.rollout.sort(dim=1).values, pair.training.sort(dim=1).values
    others = (rollout != training).any(dim=1)
    swaps: Counter[tuple[int, int]] = Counter()
    for theirs, ours in zip(rollout[others].tolist(), training[others].tolist(), strict=True):
        gained, lost = sorted(set(theirs) - set(ours)), sorted(set(ours) - set(theirs))
        swaps.update(zip(lost, gained, strict=False))
    share = float(others[judged].double().mean()) if judged.any() else 0.0
    found = PointResult(
        point,
        tokens=len(pair.rows),
        judged=int(judged.sum()),
        worst=share,
        median=share,
        worst_of_all=float(others.double().mean()) if len(others) else 0.0,
        tolerance=tolerance.swapped,
        swaps=tuple(Swap(*names, count) for names, count in swaps.most_common(_PAIRS)),
    )
    if found.diverges:
        diverging = pair.rows[judged & others]
        at = tokens.place(int(diverging[0]))
        found = replace(found, at=at, where=_where(diverging, pair.rows[judged], tokens))
    tokens.swapped[pair.rows[others]] = True
    return found


def _with_experts(found: PointResult, pair: _Pair, training: Dump, tokens: _Tokens) -> PointResult:
    """Add the fewest experts, found greedily, that explain which tokens diverge: all these have one, and no others do.

    With experts [[0, 4], [4, 7], [2, 7], [2, 3]] of four tokens, of which the first two diverge: 4 is in both and in no
    other one, so the answer is 4. Adds none if such experts do not explain all tokens, or if every token diverges.
    """
    assert found.layer is not None
    chosen = training.points.get(points.of_layer(found.layer, points.EXPERTS))
    if chosen is None:
        return found
    judged = tokens.judged(found.point, pair.rows)
    bad = dict(
        zip(pair.rows.tolist(), (judged & ~(_differences(found.point, pair) <= found.tolerance)).tolist(), strict=True)
    )
    left, innocent = set[int](), set[int]()
    users: dict[int, set[int]] = {}
    for row, experts in zip(chosen.rows.tolist(), chosen.values.tolist(), strict=True):
        if bad.get(row):
            left.add(row)
            for expert in experts:
                users.setdefault(expert, set()).add(row)
        elif row in bad:
            innocent.update(experts)
    suspects = {expert: rows for expert, rows in users.items() if expert not in innocent}
    guilty = []
    while left and suspects:
        expert = max(suspects, key=lambda each: len(suspects[each] & left))
        if not suspects[expert] & left:
            break
        left -= suspects.pop(expert)
        guilty.append(expert)
    explained = not left and len(guilty) < len(users) and innocent
    return replace(found, experts=tuple(sorted(guilty)) if explained else ())
