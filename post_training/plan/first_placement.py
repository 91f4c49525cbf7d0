"""Chooses the prompts with which each rollout rank begins, from the known lengths of their earlier answers.

Ranks of one model run graphs of one size, and the rank with the most unfinished sequences decides it. So prompts are
dealt out by length like cards: the longest ones first, one to each rank, then the next. For any length, the numbers of
longer answers on two ranks then differ by at most one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def first_placement(lengths: Sequence[float], ranks: int) -> list[int]:
    """Return an order of the prompts in which each rank takes an equal, consecutive part.

    In each round the rank with the fewest tokens so far takes the longest prompt. Lengths 9 1 5 2 on 2 ranks: rank 0
    begins with the prompts of 9 and 1, rank 1 with those of 5 and 2.

    Args:
        lengths: expected answer length of each prompt.
        ranks: number of ranks.

    Raises:
        ValueError: the parts cannot be equal.
    """
    if ranks < 1 or len(lengths) % ranks:
        raise ValueError(f"{len(lengths)} prompts do not divide among {ranks} ranks")
    falling = sorted(range(len(lengths)), key=lambda prompt: (-lengths[prompt], prompt))
    taken: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0.0] * ranks
    for begin in range(0, len(falling), ranks):
        takers = sorted(range(ranks), key=lambda rank: (tokens[rank], rank))
        for rank, prompt in zip(takers, falling[begin : begin + ranks], strict=True):
            taken[rank].append(prompt)
            tokens[rank] += lengths[prompt]
    return [prompt for of_rank in taken for prompt in sorted(of_rank)]


def expected_lengths(names: Sequence[str], known: Mapping[str, float]) -> list[float] | None:
    """Return the known length of each prompt, and their mean for all others; None if no length is known."""
    found = [known[name] for name in names if name in known]
    if not found:
        return None
    mean = sum(found) / len(found)
    return [known.get(name, mean) for name in names]
