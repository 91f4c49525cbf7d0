"""Which prompts a rank of a rollout begins with, where it is known how long their answers were before.

Ranks of one model run graphs of one size, and the rank with most unfinished sequences decides it. So prompts are dealt
out by length like cards: as many of the longest as there are ranks, one to each, then the next. Whatever length one
looks at, no two ranks then differ by more than one prompt in how many are longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def first_placement(lengths: Sequence[float], ranks: int) -> list[int]:
    """The order in which prompts are dealt out to ranks, of which each takes an equal, consecutive part.

    lengths: expected, one a prompt. Of each round the rank with fewest tokens so far takes the longest. Lengths
    9 1 5 2 on 2 ranks: rank 0 begins with the prompts of 9 and 1, rank 1 with those of 5 and 2.

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
    """The known length of each prompt, and the mean of those for the others; None where none is known."""
    found = [known[name] for name in names if name in known]
    if not found:
        return None
    mean = sum(found) / len(found)
    return [known.get(name, mean) for name in names]
