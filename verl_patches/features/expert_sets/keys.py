"""64-bit keys of token prefixes, so that rollout and training name the same token without communication.

The key of position i of a sequence depends on tokens 0 to i, like a causal model's output at that position:

    key_i = mix(sum over j <= i of (token_j + 1) * ODD ** (j + 1) modulo 2 ** 64)

`mix` is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), which spreads the sums over all 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

_ODD = 0x9E3779B97F4A7C15
_BITS = 2**64 - 1


class PrefixKey:
    """The keys of one sequence whose tokens arrive a few at a time."""

    def __init__(self) -> None:
        self.count = 0
        self._sum, self._power = 0, 1

    def advance(self, tokens: Iterable[int]) -> list[int]:
        """Take in the next tokens and return a key for each."""
        keys = []
        for token in tokens:
            self._power = self._power * _ODD & _BITS
            self._sum = self._sum + (token + 1) * self._power & _BITS
            self.count += 1
            keys.append(_mixed(self._sum))
        return keys


def prefix_keys(tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the key of every position of a whole sequence: uint64 [tokens]."""
    weighted = (tokens.astype(np.uint64) + np.uint64(1)) * _powers(1 << max(len(tokens) - 1, 0).bit_length())[
        : len(tokens)
    ]
    return mixed(np.cumsum(weighted, dtype=np.uint64))


def drawn(keys: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Return which keys belong to the drawn `share`, the same ones in every process: bool [keys]."""
    return keys <= np.uint64(min(int(share * 2**64), _BITS))


def layer_keys(keys: NDArray[np.uint64], layer: int) -> NDArray[np.uint64]:
    """Return the keys of tokens in one layer of the model."""
    return mixed(keys + np.uint64((layer + 1) * _ODD & _BITS))


def set_hashes(experts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash the sets of chosen experts [tokens, experts per token], whatever their order: uint64 [tokens]."""
    return mixed(experts.astype(np.uint64) + np.uint64(1)).sum(axis=-1, dtype=np.uint64)


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's finaliser to every element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mixed(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _BITS
    return value ^ value >> 31


@cache
def _powers(count: int) -> NDArray[np.uint64]:
    return np.cumprod(np.full(count, _ODD, dtype=np.uint64), dtype=np.uint64)
