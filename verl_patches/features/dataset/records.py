r"""Reading problems with verifiable answers from JSON and JSON-lines files.

Two shapes are known, by their columns:

- DeepScaleR: ``problem``, ``answer`` and, if present, ``solution``; the answer is the truth.
- GSM8K: ``question`` and ``answer``; the truth follows the last ``####`` of the answer.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSTRUCTION = r"Put the answer in \boxed{}."
DEEPSCALER = "deepscaler"
GSM8K = "openai/gsm8k"
_GSM8K_MARK = "####"


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


def read_problems(path: Path) -> list[Problem]:
    """Reads every problem of a ``.json`` file (a list of objects) or a ``.jsonl`` file (an object a line).

    Which of the two it is follows from the content: a file whose first character is ``[`` is a list.

    Raises:
        DataError: the file is missing, empty, not UTF-8, not JSON, or a record has neither known shape.
    """
    text = _read_text(path)
    records = _list_records(path, text) if text.lstrip().startswith("[") else _line_records(path, text)
    problems = [_to_problem(record, f"{path}, {place}") for place, record in records]
    if not problems:
        raise DataError(f"{path} holds no problem: give a file with at least one record.")
    return problems


def _read_text(path: Path) -> str:
    if not path.exists():
        raise DataError(f"The data file {path} does not exist: check the path.")
    if not path.is_file():
        raise DataError(f"{path} is not a file: give a .json or .jsonl file.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}): convert it to UTF-8.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check its permissions.") from error


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


def _to_problem(record: Any, place: str) -> Problem:
    if not isinstance(record, dict):
        raise DataError(f"{place} is not a JSON object but {type(record).__name__}: every record must be an object.")
    if "problem" in record and "answer" in record:
        answer = _text(record, "answer", place)
        return Problem(_text(record, "problem", place), answer, str(record.get("solution") or "").strip())
    if "question" in record and "answer" in record:
        solution, mark, answer = _text(record, "answer", place).rpartition(_GSM8K_MARK)
        if not mark or not answer.strip():
            raise DataError(f'{place}: the answer has no "{_GSM8K_MARK} VALUE" at its end, which GSM8K records need.')
        return Problem(_text(record, "question", place), answer.strip().replace(",", ""), solution.strip(), GSM8K)
    found = ", ".join(sorted(map(str, record))) or "none"
    raise DataError(
        f"{place} has the columns {found}: problem and answer (DeepScaleR) or question and answer (GSM8K) are needed."
    )


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
