r"""Read problems with verifiable answers from JSON, JSON-lines and parquet files.

Four formats are recognised by their columns:

- DeepScaleR: ``problem``, ``answer`` and, if present, ``solution``; the answer is the truth.
- GSM8K: ``question`` and ``answer``; the truth follows the last ``####`` of the answer.
- MATH-lighteval: ``problem`` and ``solution``; the truth is in the last ``\boxed`` of the solution, see `last_boxed`.
- Geometry3K, parquet: ``images``, ``problem`` with ``<image>`` for each of them, and ``answer``, the truth.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from post_training.data.images import PLACEHOLDER, ImageError, image_size
from post_training.rewards.answers import is_answer, last_boxed
from post_training.user_files import FileError, read_bytes

if TYPE_CHECKING:
    import pyarrow

INSTRUCTION = r"Put the answer in \boxed{}."
# The form that verl rewards for Geometry3K: thoughts between tags, and then the answer.
THINKING_INSTRUCTION = r"Think first, between <think> and </think>. Then put the answer in \boxed{}."
DEEPSCALER = "deepscaler"
GSM8K = "openai/gsm8k"
MATH = "DigitalLearningGmbH/MATH-lighteval"
GEOMETRY3K = "hiyouga/geometry3k"
_GSM8K_MARK = "####"
_LONGEST = 1 << 34
_PARQUET_MAGIC = b"PAR1"


class DataError(ValueError):
    """The data cannot be used; the message is one sentence that names the file, the place and the remedy."""


@dataclass(frozen=True)
class Problem:
    """One question with its verifiable answer.

    Attributes:
        answer: never empty.
        solution: worked solution; "" if the file has none.
        source: the kind of data, named as in verl's rewards and metrics.
        images: encoded; none for a text-only model.
    """

    question: str
    answer: str
    solution: str = ""
    source: str = DEEPSCALER
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Repetition:
    """A record with the question of an earlier record; places read like ``line 7``."""

    place: str
    first_place: str
    same_answer: bool


@dataclass(frozen=True)
class Reading:
    """The content of a file.

    Attributes:
        problems: usable problems in the file's order, each question once.
        without_answer: place and reason for each record without a verifiable answer.
        repeated: records left out because an earlier one has the same question.
    """

    problems: list[Problem]
    without_answer: list[str]
    repeated: list[Repetition]


def question_of(problem: Problem) -> tuple[str, tuple[bytes, ...]]:
    """Return a key for a problem's question without white space; the same words with other images differ."""
    return " ".join(problem.question.split()), problem.images


class _NoAnswer(Exception):
    """A record has no verifiable answer; the message says why."""


def read_problems(path: Path) -> Reading:
    """Read a ``.json`` file (a list of objects), a ``.jsonl`` file (one object per line) or a parquet file.

    The format is recognised from the content. If records have the same question (apart from white space), the first is
    kept.

    Raises:
        DataError: the file is missing, empty, not UTF-8, not JSON, a record has no known format, or no record has an
            answer.
    """
    problems: dict[tuple[str, tuple[bytes, ...]], tuple[str, Problem]] = {}
    without_answer, repeated = [], []
    for place, record in _records(path):
        try:
            problem = _to_problem(record, f"{path}, {place}")
            if not is_answer(problem.answer):
                raise _NoAnswer(f"the answer {problem.answer!r} cannot be compared with a response")
        except _NoAnswer as reason:
            without_answer.append(f"{place}: {reason}")
            continue
        first_place, first = problems.setdefault(question_of(problem), (place, problem))
        if first is not problem:
            repeated.append(Repetition(place, first_place, first.answer == problem.answer))
    if without_answer and not problems:
        raise DataError(f"{path}: no record has an answer ({without_answer[0]}). Use data with verifiable answers.")
    if not problems:
        raise DataError(f"{path} has no problems. Use a file with at least one record.")
    return Reading([problem for _, problem in problems.values()], without_answer, repeated)


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.exists():
        raise DataError(f"The data file {path} does not exist. Check the path.")
    if not path.is_file():
        raise DataError(f"{path} is not a file. Set it to a .json, .jsonl or .parquet file.")
    try:
        content = read_bytes(path, _LONGEST)
    except FileError as error:
        raise DataError(f"{error}.") from error
    if content.startswith(_PARQUET_MAGIC):
        return _parquet_records(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}). Convert it to UTF-8.") from error
    return _list_records(path, text) if text.lstrip().startswith("[") else _line_records(path, text)


def _list_records(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for index, record in enumerate(_loaded(path, text)):
        yield f"record {index + 1}", record


def _line_records(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    # Only "\n" ends a line: JSON strings may contain the other separators that str.splitlines() knows.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        yield f"line {number}", _loaded(path, line, number)


def _loaded(path: Path, text: str, line: int | None = None) -> Any:
    """Parse ``text`` as JSON; ``line`` is its number in the file, None for the whole file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = line or error.lineno
        raise DataError(f"{path}, line {place} is not valid JSON ({error.msg}). Correct that line.") from error
    except RecursionError as error:
        problem = "is nested too deeply: a record may contain only text and numbers."
        raise DataError(f"{path}, line {line} {problem}" if line else f"{path} {problem}") from error
    except ValueError as error:  # Python converts no integer of more than sys.get_int_max_str_digits() digits
        problem = f"has a number that is too long ({str(error).partition(';')[0]}). Write it as text."
        raise DataError(f"{path}, line {line} {problem}" if line else f"{path} {problem}") from error


def _parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    # Imported here, so that readers of JSON need not wait for it.
    import pyarrow
    import pyarrow.parquet

    first = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            reject_repeated_columns(path, file.schema_arrow.names)
            table = file.read()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is a broken parquet file ({_first_line(error)}). Download it again.") from error
    for batch in table.to_batches():
        for index, record in enumerate(rows_of(path, batch, first)):
            yield f"record {first + index + 1}", record
        first += batch.num_rows


def reject_repeated_columns(path: Path, names: list[str]) -> None:
    """Raise DataError if two columns of a parquet file have the same name: which of them is read is undefined."""
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(f"{path} has {names.count(repeated[0])} columns named {repeated[0]}. Keep one of them.")


def rows_of(path: Path, batch: "pyarrow.RecordBatch", first: int) -> list[dict[str, Any]]:
    """Return the rows of a batch, whose first row is row ``first`` of the file.

    Raises:
        DataError: text in it is not UTF-8.
    """
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            for number in range(len(column)):
                try:
                    column[number].as_py()
                except UnicodeDecodeError as error:
                    place = f"{path}, row {first + number}, column {name}"
                    raise DataError(f"{place} is not UTF-8 text (byte {error.start}). Convert it to UTF-8.") from error
        raise


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")


def _to_problem(record: Any, place: str) -> Problem:
    if not isinstance(record, dict):
        raise DataError(f"{place} is {type(record).__name__}, not a JSON object. Every record must be an object.")
    if "problem" in record and "answer" in record:
        question, answer = _text(record, "problem", place), _answer(record, "answer", place)
        if record.get("images"):
            return Problem(question, answer, "", GEOMETRY3K, _images(record["images"], question, place))
        solution = record.get("solution")
        solution = "" if not solution or _is_nan(solution) else str(solution).strip()
        return Problem(question, answer, _encodable(solution, "solution", place))
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


def _images(images: Any, question: str, place: str) -> tuple[bytes, ...]:
    """Return the encoded images of a record. Raises DataError if one is invalid or has no place in the question."""
    if not isinstance(images, list):
        raise DataError(f'{place}: the column "images" is {type(images).__name__}, not a list of images.')
    if question.count(PLACEHOLDER) != len(images):
        raise DataError(
            f"{place}: the problem has {PLACEHOLDER} {question.count(PLACEHOLDER)} times but {len(images)} images. "
            "Write it once for each image."
        )
    for number, image in enumerate(images, start=1):
        try:
            image_size(image)
        except ImageError as error:
            raise DataError(f"{place}: image {number} {error}. Correct it or remove the record.") from error
    return tuple(image["bytes"] for image in images)


def _boxed_answer(solution: str) -> str:
    boxed = last_boxed(solution, strict=True)
    if not boxed:
        raise _NoAnswer(
            r"the solution has no answer in a \boxed{}, which MATH-lighteval records need, or its last one has no "
            "braces and no clear end"
        )
    return boxed


def _answer(record: dict[str, Any], column: str, place: str) -> str:
    value = record[column]
    if value is None or (isinstance(value, str) and not value.strip()):
        raise _NoAnswer(f'the column "{column}" is empty')
    if _is_nan(value):
        raise _NoAnswer(f'the column "{column}" is NaN')
    return _text(record, column, place)


def _is_nan(value: Any) -> bool:
    """Return whether a value is NaN, which tables hold where nothing was filled in."""
    return isinstance(value, float) and math.isnan(value)


def _text(record: dict[str, Any], column: str, place: str) -> str:
    value = record[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f'{place}: the column "{column}" is {type(value).__name__}, neither text nor a number.')
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f'{place}: the column "{column}" is {value}, which is not an answer. Correct it.')
    try:
        text = str(value).strip()
    except ValueError as error:
        raise DataError(f'{place}: the column "{column}" has a number that is too long. Write it as text.') from error
    if not text:
        raise DataError(f'{place}: the column "{column}" is empty. Fill it in or remove the record.')
    return _encodable(text, column, place)


def _encodable(text: str, column: str, place: str) -> str:
    """Return ``text``. Raises DataError for half of a surrogate pair, which JSON can express but no file can store."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise DataError(f'{place}: the column "{column}" has the lone surrogate {half}. Correct it.') from error
    return text
