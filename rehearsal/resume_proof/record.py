"""What a proof has found so far, in a file, so that one that was ended is gone on with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from post_training.checkpoint.durable import write_text_durably
from rehearsal.resume_proof.points import Point


@dataclass(frozen=True)
class Row:
    """What became of a point. after: the step gone on from, -1 where a run failed. The rest is of `Comparison`."""

    point: str
    after: int
    steps: int
    metrics: int
    differing: tuple[str, ...]


class ProofRecord:
    """The rows of one command in `file`; those of another one that are there are replaced.

    asked: what the runs were, a text.
    """

    def __init__(self, file: Path, asked: str) -> None:
        self._file, self._asked = file, asked
        kept = json.loads(file.read_text()) if file.is_file() else {}
        rows = kept["points"] if kept.get("asked") == asked else []
        found = [Row(**row | {"differing": tuple(row["differing"])}) for row in rows]
        self._rows = {row.point: row for row in found}

    def equal(self, point: Point) -> Row | None:
        """The row of a point after which nothing differed; None where it has to be run."""
        row = self._rows.get(str(point))
        return None if row is None or row.differing else row

    def add(self, row: Row) -> None:
        """Write the rows with one more."""
        self._rows[row.point] = row
        content = {"asked": self._asked, "points": [asdict(each) for each in self._rows.values()]}
        write_text_durably(self._file, json.dumps(content, indent=1) + "\n")
