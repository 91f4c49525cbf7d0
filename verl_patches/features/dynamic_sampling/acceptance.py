"""Sizes generation batches by the share of prompts that qualified lately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any


@dataclass
class Acceptance:
    """Counts of generated prompts and of qualified prompts, in the last step and in this one so far."""

    last: tuple[int, int] = (0, 0)
    now: tuple[int, int] = field(default=(0, 0))

    def begin_step(self) -> None:
        """Make the counts so far those of the last step."""
        if self.now != (0, 0):
            self.last, self.now = self.now, (0, 0)

    def count(self, generated: int, qualified: int) -> None:
        """Count one generation batch."""
        self.now = self.now[0] + generated, self.now[1] + qualified

    @property
    def rate(self) -> float:
        """The share that qualifies, kept above 0 by counting an extra qualified prompt; 1 before the first batch."""
        return (self.last[1] + self.now[1] + 1) / (self.last[0] + self.now[0] + 1)

    def gen_batch_size(self, missing: int, multiple: int, largest: int) -> int:
        """Return how many prompts to generate for to get `missing` more: a multiple of `multiple`, at most `largest`.

        With half of the prompts qualifying and 20 missing, 40 prompts; 44 in multiples of 4 at a rate of 0.46.
        """
        wanted = ceil(missing / self.rate)
        return min(ceil(wanted / multiple) * multiple, largest)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {"last": list(self.last), "now": list(self.now)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Acceptance:
        """Restore the counts that `state_dict` returned."""
        (a, b), (c, d) = state["last"], state["now"]
        return cls((int(a), int(b)), (int(c), int(d)))
