"""The problems to evaluate on: files of problems, and the parquet files that a training reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from post_training.data import INSTRUCTION, DataError, read_problems, to_row
from post_training.data.inspection import check_file


@dataclass(frozen=True)
class Question:
    """A chat to be answered, and the right answer.

    Attributes:
        messages: The chat.
        truth: The right answer.
        source: verl's data_source, for the reward.
        extra: verl's extra_info, for the reward.
    """

    messages: tuple[dict[str, str], ...]
    truth: str
    source: str
    extra: dict[str, Any]

    @property
    def text(self) -> str:
        """The contents of the messages, as a page shows them."""
        return "\n".join(message["content"] for message in self.messages)


def read_questions(path: Path, instruction: str = INSTRUCTION) -> list[Question]:
    """Return the questions of a file, in its order.

    A parquet file that a training reads is taken as it is. In any other kind of file that json_to_parquet.py reads, a
    problem is asked as it does: the question, a space, and `instruction`.

    Raises:
        DataError: the file cannot be used; one sentence.
    """
    rows = _training_rows(path)
    if rows is None:
        problems = read_problems(path).problems
        if problems[0].images:
            raise DataError(f"{path} has images, but evaluate.py supports text only. Use problems without images.")
        rows = [to_row(problem, index, "test", None, instruction) for index, problem in enumerate(problems)]
    return [
        Question(
            tuple({"role": message["role"], "content": message["content"]} for message in row["prompt"]),
            str(row["reward_model"]["ground_truth"]),
            row["data_source"],
            dict(row.get("extra_info") or {}),
        )
        for row in rows
    ]


def _training_rows(path: Path) -> list[dict[str, Any]] | None:
    """Return the rows of a training's parquet file; None for any other file."""
    if not path.is_file():
        return None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            trained = "prompt" in file.schema_arrow.names
    except (pyarrow.ArrowException, OSError):
        return None
    if not trained:
        return None
    check_file(path)
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return rows
