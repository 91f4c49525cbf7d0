"""Convert question files of several formats to the parquet files that verl reads."""

from post_training.data.records import INSTRUCTION, DataError, Problem, Reading, question_of, read_problems
from post_training.data.rows import split, to_image_row, to_row, to_rows

__all__ = [
    "INSTRUCTION",
    "DataError",
    "Problem",
    "Reading",
    "question_of",
    "read_problems",
    "split",
    "to_image_row",
    "to_row",
    "to_rows",
]
