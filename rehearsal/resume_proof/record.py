"""The results of a proof in a file, so that an interrupted proof continues with the points that are left."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from post_training.checkpoint.durable import write_text_durably
from rehearsal.resume_proof.points import Point


@dataclass(frozen=True)
class Row:
    """The result of one point; steps, metrics and differing are those of its `Comparison`.

    Attributes:
        after: the step that the run resumed from, -1 if a run failed.
    """

    point: str
    after: int
    steps: int
    metrics: int
    differing: tuple[str, ...]


class ProofRecord:
    """The rows of one command in `file`; rows of another command are replaced.

    Args:
        file: JSON, which need not exist yet.
        asked: the configuration of the runs as text, which identifies the command.
    """

    def __init__(self, file: Path, asked: str) -> None:
        self._file, self._asked = file, asked
        kept = json.loads(file.read_text()) if file.is_file() else {}
        rows = kept["points"] if kept.get("asked") == asked else []
        found = [Row(**row | {"differing": tuple(row["differing"])}) for row in rows]
        self._rows = {row.point: row for row in found}

    def equal(self, point: Point) -> Row | None:
        """Return the row of a point after which nothing differed; None if the point has to be run."""
        row = self._rows.get(str(point))
        return None if row is None or row.differing else row

    def add(self, row: Row) -> None:
        """Add a row and write the file."""
        self._rows[row.point] = row
        content = {"asked": self._asked, "points": [asdict(each) for each in self._rows.values()]}
        write_text_durably(self._file, json.dumps(content, indent=1) + "\n")
