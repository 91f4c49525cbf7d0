#!/usr/bin/env python3
r"""Convert a file of problems to train.parquet and test.parquet for verl.

Reads deepscaler.json (problem, answer, solution), GSM8K (question, answer) and MATH-lighteval (problem, solution), as
.json, .jsonl or .parquet, and Geometry3K (images, problem, answer) as .parquet. Records without an answer and repeated
questions are left out and reported. Of the files in the output folder, it replaces only those of an earlier conversion.

Example:
    python scripts/json_to_parquet.py --json_path deepscaler.json \
        --output_dir data/deepscaler
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow
import pyarrow.parquet

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from post_training.arguments import finite  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.data import DataError, Problem, Reading, question_of, read_problems, split, to_rows  # noqa: E402
from post_training.data.inspection import Expectations, check_file  # noqa: E402
from post_training.data.parquet import IMAGE_SCHEMA, SCHEMA, write_files  # noqa: E402
from post_training.data.records import INSTRUCTION, THINKING_INSTRUCTION  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--json_path", type=Path, metavar="FILE", required=True, help="the file with the problems")
    parser.add_argument(
        "--output_dir", type=Path, metavar="DIR", required=True, help="folder for train.parquet and test.parquet"
    )
    parser.add_argument(
        "--test_json_path",
        type=Path,
        metavar="FILE",
        help="test problems in their own file; nothing is shuffled or split then",
    )
    parser.add_argument("--test_size", type=finite(), default=0.1, help="share of the records held out (default: 0.1)")
    parser.add_argument("--seed", type=int, default=42, help="seed of the shuffle and split (default: 42)")
    parser.add_argument("--data_source", metavar="NAME", help="name of the data in the metrics (default: by its kind)")
    parser.add_argument(
        "--instruction",
        metavar="TEXT",
        help=f'ends every prompt (default: "{INSTRUCTION}", and for problems with images "{THINKING_INSTRUCTION}")',
    )
    return parser.parse_args(arguments)


def report(path: Path, reading: Reading) -> None:
    """Print what was left out of a file, with the first record of each kind."""
    if reading.without_answer:
        print(f"{path}: dropped {len(reading.without_answer)} without an answer (first: {reading.without_answer[0]})")
    if reading.repeated:
        first = reading.repeated[0]
        different = sum(not repetition.same_answer for repetition in reading.repeated)
        print(
            f"{path}: dropped {len(reading.repeated)} whose question occurs before, {different} of them with another "
            f"answer (first: {first.place} repeats {first.first_place})"
        )


def read_reported(path: Path) -> list[Problem]:
    """Return the usable problems of a file, after printing a report on the others."""
    reading = read_problems(path)
    report(path, reading)
    return reading.problems


def reject_other_files(options: argparse.Namespace, outputs: Iterable[Path]) -> None:
    """Raise DataError if an output would replace an input, or a file that this command has not written."""
    inputs = {"--json_path": options.json_path, "--test_json_path": options.test_json_path}
    for output in filter(Path.exists, outputs):
        same = [option for option, path in inputs.items() if path and path.exists() and output.samefile(path)]
        if same or not _is_own(output):
            reason = f"is the file of {same[0]}" if same else "exists and is not a file that this command writes"
            raise DataError(
                f"--output_dir={options.output_dir} is invalid: {output} {reason}. Set it to another folder."
            )


def _is_own(path: Path) -> bool:
    """Return whether a file has the columns that this command writes."""
    try:
        return set(SCHEMA.names) <= set(pyarrow.parquet.read_schema(path).names)
    except (pyarrow.ArrowException, OSError):
        return False


def load(options: argparse.Namespace) -> tuple[list[Problem], list[Problem]]:
    """Return the training and the test problems that the options ask for; no question is in both."""
    for option, text in (("--data_source", options.data_source), ("--instruction", options.instruction)):
        if not _is_text(text or ""):
            raise DataError(f"{option} is not UTF-8 text. Set it in UTF-8.")
    problems = read_reported(options.json_path)
    if options.test_json_path is None:
        if not 0 < options.test_size < 1:
            raise DataError(f"--test_size={options.test_size} is invalid. Set it between 0 and 1.")
        return split(problems, max(1, round(len(problems) * options.test_size)), options.seed)
    test = read_reported(options.test_json_path)
    tested = set(map(question_of, test))
    train = [problem for problem in problems if question_of(problem) not in tested]
    if len(train) < len(problems):
        print(f"{options.json_path}: dropped {len(problems) - len(train)} that are also test problems")
    if not train:
        raise DataError(f"{options.json_path} has only test problems. Use separate training problems.")
    return train, test


def _is_text(argument: str) -> bool:
    """Return whether an argument of the command line was UTF-8; Python keeps other bytes as surrogates."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def main(arguments: list[str] | None = None) -> int:
    """Convert the file and return the exit status."""
    options = parse_arguments(arguments)
    outputs = {name: options.output_dir / f"{name}.parquet" for name in ("train", "test")}
    try:
        reject_other_files(options, outputs.values())
        train, test = load(options)
        has_images = bool(train[0].images)
        files = {
            outputs[name]: to_rows(problems, name, options.data_source, options.instruction)
            for name, problems in (("train", train), ("test", test))
        }
        if bool(test[0].images) != has_images:
            raise DataError("Only one of training and test problems has images. Use one kind.")
        write_files(files, IMAGE_SCHEMA if has_images else SCHEMA)
        for path in files:
            print(f"{path}: {check_file(path, Expectations(image_key='images' if has_images else None))} rows")
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
