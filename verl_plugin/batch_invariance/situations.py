"""Batches in which one sample is computed: alone, beside others, in chunks, after a cached prefix."""

from __future__ import annotations

import random
from dataclasses import dataclass

BLOCK = 128
"""Tokens in a block of vLLM-Ascend's KV cache, which finds no shorter prefix."""


@dataclass(frozen=True)
class Situation:
    """One batch.

    Attributes:
        name: for people.
        before, behind: number of other samples in the batch, on either side.
        chunk: most tokens of a prompt that a step computes; 0 for whole prompts.
        cached: the beginning of the prompt is read from the cache.
        elsewhere: number of other samples in another data-parallel engine, which has some of this one's experts.
    """

    name: str
    before: int = 0
    behind: int = 0
    chunk: int = 0
    cached: bool = False
    elsewhere: int = 0


ALONE = Situation("alone")
SITUATIONS = (
    Situation("first of 2", behind=1),
    Situation("first of 8", behind=7),
    Situation("last of 8", before=7),
    Situation("prompt in chunks of 48", chunk=48),
    Situation("prompt's beginning from the cache", cached=True),
    Situation("4th of 8, in chunks", before=3, behind=4, chunk=48),
)
BESIDE_ENGINES = (
    Situation("1 in the other engine", elsewhere=1),
    Situation("7 in the other engine", elsewhere=7),
    Situation("first of 8, 7 in the other engine", behind=7, elsewhere=7),
)
"""Situations of two data-parallel engines; in those above the other one has no samples and runs dummy batches."""
AGAIN = Situation("alone, again")
"""The control: the batch is the same, so no log-prob may differ."""


def situations_of(engines: int) -> tuple[Situation, ...]:
    """Return the situations of one engine, or of two data-parallel ones."""
    return SITUATIONS + BESIDE_ENGINES if engines > 1 else SITUATIONS


@dataclass(frozen=True)
class Prompts:
    """Prompts of random tokens.

    Attributes:
        sample: the prompt whose answer is compared.
        others: its neighbours, of many lengths.
    """

    sample: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]


def make_prompts(vocabulary: int, length: int, seed: int = 0) -> Prompts:
    """Draw a sample, and seven neighbours whose lengths go from 3 tokens to that of the sample.

    Args:
        vocabulary: number of tokens in the model's vocabulary.
        length: number of tokens in the sample's prompt; more than `BLOCK`, so that a cached prefix is found.
        seed: of the draw.
    """
    draw = random.Random(seed)
    lengths = [length, *(3 + place * (length - 3) // 6 for place in range(7))]
    sample, *others = (tuple(draw.randrange(3, vocabulary) for _ in range(each)) for each in lengths)
    return Prompts(sample, tuple(others))


def batch_of(situation: Situation, prompts: Prompts) -> tuple[list[tuple[int, ...]], int]:
    """Return the prompts of a batch, and the sample's place in it."""
    before = list(prompts.others[: situation.before])
    behind = list(prompts.others[situation.before : situation.before + situation.behind])
    return [*before, prompts.sample, *behind], situation.before
