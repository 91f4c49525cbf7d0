"""Question files of several shapes, turned into the parquet files that verl reads."""

from verl_patches.features.dataset.records import INSTRUCTION, DataError, Problem, Reading, read_problems
from verl_patches.features.dataset.rows import split, to_row

__all__ = ["INSTRUCTION", "DataError", "Problem", "Reading", "read_problems", "split", "to_row"]
