r"""Reading problems with verifiable answers from JSON, JSON-lines and parquet files.

Three shapes are known, by their columns:

- DeepScaleR: ``problem``, ``answer`` and, if present, ``solution``; the answer is the truth.
- GSM8K: ``question`` and ``answer``; the truth follows the last ``####`` of the answer.
- MATH-lighteval: ``problem`` and ``solution``; the truth is in the last ``\boxed`` of the solution.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_patches.features.reward.answers import last_boxed

INSTRUCTION = r"Put the answer in \boxed{}."
DEEPSCALER = "deepscaler"
GSM8K = "openai/gsm8k"
MATH = "DigitalLearningGmbH/MATH-lighteval"
_GSM8K_MARK = "####"
_PARQUET_MAGIC = b"PAR1"
# MATH also writes \fbox{...}, and \boxed 5 for an answer of one token.
_OTHER_BOXES = re.compile(r"\\fbox(?=\{)")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$]+)")


class DataError(ValueError):
    """The data cannot be used; the message is one sentence that names the file, the place and the remedy."""


@dataclass(frozen=True)
class Problem:
    """One question, its verifiable answer (never empty), and a worked solution ("" where the file has none).

    ``source`` names the kind of data, as verl's rewards and metrics do.
    """

    question: str
    answer: str
    solution: str = ""
    source: str = DEEPSCALER


@dataclass(frozen=True)
class Repetition:
    """A record whose question an earlier record asks too; places are such as ``line 7``."""

    place: str
    first_place: str
    same_answer: bool


@dataclass(frozen=True)
class Reading:
    """What a file holds: its usable problems in the file's order, each question once, and what was left out.

    ``without_answer`` has a place and a reason for each record without a verifiable answer.
    """

    problems: list[Problem]
    without_answer: list[str]
    repeated: list[Repetition]


class _NoAnswer(Exception):
    """A record has no verifiable answer; the message says why."""


def read_problems(path: Path) -> Reading:
    """Reads a ``.json`` file (a list of objects), a ``.jsonl`` file (an object a line) or a parquet file.

    Which of them it is follows from the content. Of records with the same question (apart from white space) the first
    is kept.

    Raises:
        DataError: the file is missing, empty, not UTF-8, not JSON, a record has no known shape, or no record has an
            answer.
    """
    problems: dict[str, tuple[str, Problem]] = {}
    without_answer, repeated = [], []
    for place, record in _records(path):
        try:
            problem = _to_problem(record, f"{path}, {place}")
        except _NoAnswer as reason:
            without_answer.append(f"{place}: {reason}")
            continue
        first_place, first = problems.setdefault(" ".join(problem.question.split()), (place, problem))
        if first is not problem:
            repeated.append(Repetition(place, first_place, first.answer == problem.answer))
    if without_answer and not problems:
        raise DataError(f"{path}: no record has an answer ({without_answer[0]}): give data with verifiable answers.")
    if not problems:
        raise DataError(f"{path} holds no problem: give a file with at least one record.")
    return Reading([problem for _, problem in problems.values()], without_answer, repeated)


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.exists():
        raise DataError(f"The data file {path} does not exist: check the path.")
    if not path.is_file():
        raise DataError(f"{path} is not a file: give a .json, .jsonl or .parquet file.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check its permissions.") from error
    if content.startswith(_PARQUET_MAGIC):
        return _parquet_records(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}): convert it to UTF-8.") from error
    return _list_records(path, text) if text.lstrip().startswith("[") else _line_records(path, text)


def _list_records(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno} is not valid JSON ({error.msg}): correct that line.") from error
    for index, record in enumerate(records):
        yield f"record {index + 1}", record


def _line_records(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    # Only "\n" ends a line: JSON strings may hold the other separators that str.splitlines() knows.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number} is not valid JSON ({error.msg}): correct that line.") from error
        yield f"line {number}", record


def _parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    # Imported here: readers of JSON need not wait for it.
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is a broken parquet file ({_first_line(error)}): download it again.") from error
    for index, record in enumerate(table.to_pylist()):
        yield f"record {index + 1}", record


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")


def _to_problem(record: Any, place: str) -> Problem:
    if not isinstance(record, dict):
        raise DataError(f"{place} is not a JSON object but {type(record).__name__}: every record must be an object.")
    if "problem" in record and "answer" in record:
        question, answer = _text(record, "problem", place), _answer(record, "answer", place)
        return Problem(question, answer, str(record.get("solution") or "").strip())
    if "question" in record and "answer" in record:
        solution, mark, answer = _answer(record, "answer", place).rpartition(_GSM8K_MARK)
        if not mark or not answer.strip():
            raise _NoAnswer(f'the answer has no "{_GSM8K_MARK} VALUE" at its end, which GSM8K records need')
        return Problem(_text(record, "question", place), answer.strip().replace(",", ""), solution.strip(), GSM8K)
    if "problem" in record and "solution" in record:
        solution = _answer(record, "solution", place)
        return Problem(_text(record, "problem", place), _boxed_answer(solution), solution, MATH)
    found = ", ".join(sorted(map(str, record))) or "none"
    raise DataError(
        f"{place} has the columns {found}: problem and answer (DeepScaleR), question and answer (GSM8K) or problem and "
        "solution (MATH-lighteval) are needed."
    )


def _boxed_answer(solution: str) -> str:
    boxed = last_boxed(_OTHER_BOXES.sub(r"\\boxed", _BARE_BOX.sub(r"\\boxed{\1}", solution)))
    if not boxed:
        raise _NoAnswer(r"the solution has no answer in a \boxed{}, which MATH-lighteval records need")
    return boxed


def _answer(record: dict[str, Any], column: str, place: str) -> str:
    value = record[column]
    if value is None or (isinstance(value, str) and not value.strip()):
        raise _NoAnswer(f'the column "{column}" is empty')
    return _text(record, column, place)


def _text(record: dict[str, Any], column: str, place: str) -> str:
    value = record[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f'{place}: the column "{column}" holds {type(value).__name__} and not text or a number.')
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f'{place}: the column "{column}" holds {value}, which is no answer: correct it.')
    text = str(value).strip()
    if not text:
        raise DataError(f'{place}: the column "{column}" is empty: fill it in or leave the record out.')
    return text
