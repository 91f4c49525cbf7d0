#!/usr/bin/env python3
"""Turns a file of problems into train.parquet and test.parquet for verl.

Knows deepscaler.json (problem, answer, solution), GSM8K's jsonl (question, answer) and the data in data/.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl_patches.features.dataset import INSTRUCTION, DataError, Problem, read_problems, split, to_row  # noqa: E402
from verl_patches.features.dataset.parquet import check_file, write_rows  # noqa: E402


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json_path", type=Path, required=True, help="the .json or .jsonl file with the problems")
    parser.add_argument(
        "--output_dir", type=Path, required=True, help="where train.parquet and test.parquet are written"
    )
    parser.add_argument(
        "--test_json_path", type=Path, help="test problems in a file of their own; nothing is split then"
    )
    parser.add_argument("--test_size", type=float, default=0.1, help="part of the records held out (default: 0.1)")
    parser.add_argument("--seed", type=int, default=42, help="seed of the split (default: 42)")
    parser.add_argument("--data_source", help="name of the data in the metrics (default: by its kind)")
    parser.add_argument("--instruction", default=INSTRUCTION, help=f'ends every prompt (default: "{INSTRUCTION}")')
    return parser.parse_args(arguments)


def load(options: argparse.Namespace) -> tuple[list[Problem], list[Problem]]:
    """Returns the training and the test problems that the options ask for."""
    problems = read_problems(options.json_path)
    if options.test_json_path is not None:
        return problems, read_problems(options.test_json_path)
    if not 0 < options.test_size < 1:
        raise DataError(f"--test_size is {options.test_size}: it must be between 0 and 1.")
    return split(problems, max(1, round(len(problems) * options.test_size)), options.seed)


def main(arguments: list[str] | None = None) -> int:
    """Converts; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        for name, problems in zip(("train", "test"), load(options), strict=True):
            rows = [
                to_row(problem, index, name, options.data_source, options.instruction)
                for index, problem in enumerate(problems)
            ]
            path = options.output_dir / f"{name}.parquet"
            write_rows(path, rows)
            print(f"{path}: {check_file(path)} rows")
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
