"""Compute what the decode loop of a rollout costs with sequences of different lengths, without a device.

Example:
    python benchmarks/decode_schedule.py --ranks 2 16 256 --sequences 32

Ranks of one model run graphs of the same size, so a slot-step is one slot of one rank's graph in one decode step.
Six schedules run the same sequences: one graph for a whole rollout; a graph for every size, without moving sequences;
the published rebalance of cann-recipes-train, simulated from its description, which decides every 1000 steps and has
graphs down to 4; and ours, which decides every 16 steps and has graphs down to 1. "Placed" are the second and the
fourth with prompts dealt out by the mean length of their answers in the epoch before, which is drawn for the same
prompts and wrong by a log-normal factor of --drift besides; with --lengths it is that of the file's own lengths, wrong
by the factor. The bound is the steps of the ranks if sequences moved for free before every step. Bytes are the KV cache
of the sequences that move, in blocks and without prompts, of DeepSeek-V3.

A second table is of partial rollouts: a training of several steps over groups of 16 samples each, in which a rollout
ends at --threshold, and the rest continues in at most --max-steps further steps; all sequences decode together.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.options import Parser, make_parser, write_results  # noqa: E402
from benchmarks.partial_rollouts import PartialCost, partial_cost  # noqa: E402
from post_training.arguments import whole  # noqa: E402
from post_training.plan.first_placement import first_placement  # noqa: E402
from post_training.plan.partial_rollout import LEAST_THRESHOLD, PartialRollout  # noqa: E402
from post_training.plan.rebalance import Move, bucket, least_slot_steps, rebalance  # noqa: E402

Decide = Callable[[Sequence[int], Sequence[int]], list[Move]]

WINDOW_STEPS = 16
PUBLISHED_INTERVAL, PUBLISHED_SMALLEST = 1000, 4
BLOCK_TOKENS = 128
# Bytes a token of DeepSeek-V3's KV cache takes on a rank: (512 + 64) values of bfloat16 in 61 layers.
TOKEN_BYTES = (512 + 64) * 2 * 61
RANKS = (2, 4, 8, 16, 32, 64, 128, 256)
SAMPLES = 16
KINDS = ("fixed", "uniform", "log-normal")


@dataclass(frozen=True)
class Schedule:
    """A way to run a rollout.

    Attributes:
        sizes: of its graphs.
        interval: steps between two calls of `decide`.
        decide: may move sequences.
        agree_every: steps between two exchanges of agreements.
        agreements_each: agreements of one exchange.
        placed: whether prompts are dealt out by length.
    """

    name: str
    sizes: tuple[int, ...]
    interval: int
    decide: Decide
    agree_every: int = 1
    agreements_each: int = 2
    placed: bool = False


@dataclass(frozen=True)
class Cost:
    """One row.

    Attributes:
        ratio: slot_steps over the bound.
        lost: sequences that did not end; must be 0.
    """

    lengths: str
    ranks: int
    schedule: str
    decode_steps: int
    slot_steps: int
    ratio: float
    agreements: int
    moved: int
    moved_bytes: int
    lost: int


def stay(counts: Sequence[int], sizes: Sequence[int]) -> list[Move]:
    """Move nothing."""
    return []


def published_decision(counts: Sequence[int], sizes: Sequence[int]) -> list[Move]:
    """Decide as the published rebalance does.

    It takes the smallest graph that holds the mean, if that is smaller than the present one. The emptiest ranks take
    first, as much as fits, from the fuller ranks in turn.
    """
    present, mean = bucket(max(counts), sizes), sum(counts) / len(counts)
    smaller = [size for size in sizes if mean <= size < present]
    if not smaller:
        return []
    size, moves = min(smaller), []
    surplus = {rank: count - size for rank, count in enumerate(counts) if count > size}
    places = {rank: size - count for rank, count in enumerate(counts) if count < size}
    while surplus:
        givers = list(surplus)
        for turn, taker in enumerate(sorted(places, key=lambda rank: -places[rank])):
            giver = givers[turn % len(givers)]
            number = min(surplus[giver], places[taker])
            if number:
                moves.append(Move(giver, taker, number))
                surplus[giver] -= number
                places[taker] -= number
        surplus = {rank: left for rank, left in surplus.items() if left}
        places = {rank: left for rank, left in places.items() if left}
    return moves


def schedules(most: int) -> list[Schedule]:
    """Return the six schedules for ranks that begin with `most` sequences."""
    powers = tuple(sorted({min(most, 2**power) for power in range(most.bit_length() + 1)}))
    published = tuple(size for size in powers if size >= min(most, PUBLISHED_SMALLEST))
    return [
        Schedule("one graph", (most,), 1, stay),
        Schedule("no moves", powers, 1, stay),
        Schedule("published", published, PUBLISHED_INTERVAL, published_decision),
        Schedule("ours", powers, WINDOW_STEPS, rebalance, agree_every=WINDOW_STEPS, agreements_each=1),
        Schedule("placed", powers, 1, stay, placed=True),
        Schedule("placed, ours", powers, WINDOW_STEPS, rebalance, WINDOW_STEPS, agreements_each=1, placed=True),
    ]


def run(lengths: NDArray[np.int64], ranks: int, schedule: Schedule) -> tuple[int, int, int, int, int]:
    """Run the sequences, dealt out in order; a sequence that is moved to rank -1 is lost.

    Returns:
        (slot-steps, agreements, sequences moved, bytes moved, sequences lost)
    """
    most = len(lengths) // ranks
    place = np.arange(len(lengths)) // most
    order = np.argsort(lengths, kind="stable")
    counts = np.full(ranks, most)
    slots = moved = moved_bytes = ended = 0
    size = bucket(most, schedule.sizes)
    for step in range(int(lengths.max())):
        if step % schedule.agree_every == 0:
            if step and step % schedule.interval == 0:
                for move in schedule.decide(counts.tolist(), schedule.sizes):
                    chosen = np.flatnonzero((place == move.source) & (lengths > step))[: move.sequences]
                    place[chosen] = move.target
                    counts = np.bincount(place[(lengths > step) & (place >= 0)], minlength=ranks)
                    moved += len(chosen)
                    moved_bytes += len(chosen) * -(-step // BLOCK_TOKENS) * BLOCK_TOKENS * TOKEN_BYTES
            size = bucket(int(counts.max()), schedule.sizes)
        slots += ranks * size
        first = ended
        while ended < len(order) and lengths[order[ended]] == step + 1:
            ended += 1
        places = place[order[first:ended]]
        np.subtract.at(counts, places[places >= 0], 1)
    steps = int(lengths.max())
    agreements = -(-steps // schedule.agree_every) * schedule.agreements_each + 1
    return slots, agreements, moved, moved_bytes, int((place < 0).sum() + counts.sum())


def bound(lengths: NDArray[np.int64], ranks: int, sizes: Sequence[int]) -> int:
    """Return the slot-steps if the running sequences were spread evenly over the ranks before every step."""
    running = len(lengths) - np.searchsorted(np.sort(lengths), np.arange(int(lengths.max())), side="right")
    return least_slot_steps(running, ranks, sizes)


def drawn(kind: str, ranks: int, each: int, longest: int, seed: int, epoch: int = 0) -> NDArray[np.int64]:
    """Draw the lengths of ranks x each sequences.

    The samples of one prompt are on one rank and resemble each other: two thirds of a log-normal length's variance
    belong to the prompt. In another epoch the same prompts have other samples.
    """
    random = np.random.default_rng(seed)
    count = ranks * each
    if kind == "fixed":
        return np.full(count, longest)
    if kind == "uniform":
        return [random.integers(1, longest + 1, count) for _ in range(epoch + 1)][-1]
    prompts = np.repeat(random.normal(0, 1, -(-count // SAMPLES)), SAMPLES)[:count]
    own = [random.normal(0, 1, count) for _ in range(epoch + 1)][-1]
    spread = np.sqrt(2 / 3) * prompts + np.sqrt(1 / 3) * own
    return np.clip(np.exp(np.log(longest / 16) + spread), 1, longest).astype(np.int64)


def placed_order(before: NDArray[np.int64], ranks: int, drift: float, seed: int) -> NDArray[np.int64]:
    """Return the order in which sequences are dealt out by `before`, the lengths of the previous epoch.

    The samples of a prompt stay together. If ranks do not hold whole prompts, every sequence counts as its own prompt.
    """
    samples = SAMPLES if len(before) % (ranks * SAMPLES) == 0 else 1
    means = before.reshape(-1, samples).mean(-1)
    means *= np.exp(drift * np.random.default_rng((seed, 1)).normal(0, 1, len(means)))
    prompts = np.array(first_placement(means.tolist(), ranks))
    return (prompts[:, None] * samples + np.arange(samples)).reshape(-1)


def costs(name: str, lengths: NDArray[np.int64], ranks: int, placed: NDArray[np.int64] | None = None) -> list[Cost]:
    """Return one row per schedule.

    `placed` is the order in which sequences are dealt out by length; without it they keep their order.
    """
    every = schedules(len(lengths) // ranks)
    least = bound(lengths, ranks, every[-1].sizes)
    rows = []
    for schedule in every:
        dealt = lengths[placed] if schedule.placed and placed is not None else lengths
        slots, agreements, moved, moved_bytes, lost = run(dealt, ranks, schedule)
        ratio = round(slots / least, 3)
        steps = int(lengths.max())
        rows.append(Cost(name, ranks, schedule.name, steps, slots, ratio, agreements, moved, moved_bytes, lost))
    return rows


def read_lengths(path: Path, ranks: int) -> NDArray[np.int64]:
    """Read the lengths in a file, one number per line, without a rest at its end that does not fill all ranks evenly.

    Raises:
        ValueError: a line is no whole number from 1 on, or there are fewer lines than ranks.
    """
    lines = path.read_text(encoding="utf-8").split()
    for number, line in enumerate(lines, start=1):
        if not (line.isascii() and line.isdecimal() and 0 < int(line) < 10**9):
            raise ValueError(
                f"{path}, line {number}: {line!r} is not a length. Write one whole number, at least 1, per line"
            )
    if len(lines) < ranks:
        raise ValueError(f"{path} has {len(lines)} lengths for {ranks} ranks. Add lengths, or lower --ranks")
    return np.array(lines[: len(lines) // ranks * ranks], dtype=np.int64)


def factor(text: str) -> float:
    """Parse --drift."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 10:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 10")
    return number


def share(text: str) -> float:
    """Parse --threshold."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not LEAST_THRESHOLD <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {LEAST_THRESHOLD} to 1")
    return number


def options_of(parser: Parser) -> argparse.Namespace:
    parser.add_argument("--ranks", type=whole(2), nargs="+", default=list(RANKS), help="rollout ranks of one model")
    parser.add_argument("--sequences", type=whole(1), default=32, help="on a rank at first (default: %(default)s)")
    parser.add_argument("--longest", type=whole(16), default=16384, help="response, in tokens (default: %(default)s)")
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="lengths of responses, one number per line")
    parser.add_argument(
        "--drift", type=factor, default=0.25, metavar="X", help="of known lengths (default: %(default)s)"
    )
    parser.add_argument(
        "--threshold", type=share, default=0.8, metavar="X", help="of partial rollouts (default: %(default)s)"
    )
    parser.add_argument("--max-steps", type=whole(1), default=2, help="of partial rollouts (default: %(default)s)")
    parser.add_argument("--training-steps", type=whole(1), default=50, help="with them (default: %(default)s)")
    parser.add_argument("--seed", type=whole(0), default=0, help="default: %(default)s")
    return parser.parse_args()


def schedule_rows(options: argparse.Namespace) -> list[Cost]:
    """Compute the first table and print each row as soon as it is known."""
    rows: list[Cost] = []
    print(
        f"{'lengths':<12}{'ranks':>6}  {'schedule':<13}{'steps':>7}{'ratio':>8}{'agreements':>12}{'moved':>7}{'GB':>9}"
    )
    for ranks in options.ranks:
        drawn_now, drawn_before = (
            {kind: drawn(kind, ranks, options.sequences, options.longest, options.seed, epoch) for kind in KINDS}
            for epoch in (0, 1)
        )
        given = {kind: (lengths, drawn_before[kind]) for kind, lengths in drawn_now.items()}
        if options.lengths:
            given[options.lengths.name] = (read_lengths(options.lengths, ranks),) * 2
        for name, (lengths, before) in given.items():
            order = placed_order(before, ranks, options.drift, options.seed)
            for row in costs(name, lengths, ranks, order):
                rows.append(row)
                print(
                    f"{row.lengths:<12}{row.ranks:>6}  {row.schedule:<13}{row.decode_steps:>7}{row.ratio:>8.3f}"
                    f"{row.agreements:>12}{row.moved:>7}{row.moved_bytes / 1e9:>9.2f}",
                    flush=True,
                )
    return rows


def partial_rows(options: argparse.Namespace) -> list[PartialCost]:
    """Compute the second table. If a file has too few lengths, they are repeated."""
    rows: list[PartialCost] = []
    print(
        f"\n{'lengths':<12}{'ranks':>6}{'without':>10}{'partial':>10}{'saved':>8}{'old':>8}{'mean age':>10}"
        f"{'max age':>9}{'again':>8}"
    )
    for ranks in options.ranks:
        prompts = max(1, ranks * options.sequences // SAMPLES)
        policy = PartialRollout(prompts, options.threshold, options.max_steps)
        each = prompts * options.training_steps * SAMPLES
        given = {kind: drawn(kind, 1, each, options.longest, options.seed) for kind in KINDS}
        if options.lengths:
            given[options.lengths.name] = np.resize(read_lengths(options.lengths, 1), each)
        for name, lengths in given.items():
            groups = lengths.reshape(-1, SAMPLES)
            row = partial_cost(name, ranks, groups, policy, options.training_steps, WINDOW_STEPS)
            rows.append(row)
            print(
                f"{row.lengths:<12}{row.ranks:>6}{row.without:>10}{row.decode_steps:>10}{row.saved:>8.3f}"
                f"{row.old_share:>8.3f}{row.mean_age:>10.3f}{row.max_age:>9}{row.again:>8.3f}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    options = options_of(parser)
    try:
        schedules_found, partial_found = schedule_rows(options), partial_rows(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    results = {
        "schedules": [asdict(cost) for cost in schedules_found],
        "partial_rollouts": [asdict(cost) for cost in partial_found],
    }
    write_results(options.json, results)


if __name__ == "__main__":
    main()
