"""Check everything that verl reads in a parquet file, before a run fails on it deep inside.

verl's data set reads the prompt and ``extra_info``, its reward manager ``reward_model.ground_truth`` and the data
source; the values of all other columns it only passes along.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from post_training.data.images import PLACEHOLDER, ImageError, ImageTokens, Size, image_size, placeholders
from post_training.data.records import DataError, reject_repeated_columns, rows_of
from post_training.rewards.answers import is_answer

_BATCH_ROWS = 1024
_SHOWN_CHARACTERS = 60
_LISTED_ROWS = 20
_ROLES = ("system", "user", "assistant", "tool")
_IMAGES, _MEDIA = "images", ("images", "videos")
_CONVERT = "convert the original data with scripts/json_to_parquet.py"


@dataclass(frozen=True)
class Expectations:
    """The settings of the run that reads the file; fields are named after verl's keys under ``data``.

    Attributes:
        max_prompt_length: in tokens; matters only with a tokenizer.
        filter_overlong_prompts: whether verl leaves longer prompts out; otherwise it fails on them.
        image_key: None for a text-only model.
        image_tokens: how the model's processor counts tokens of images.
    """

    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    max_prompt_length: int = 1024
    filter_overlong_prompts: bool = False
    image_key: str | None = None
    image_tokens: ImageTokens = ImageTokens()


@dataclass
class DataFinding:
    """One kind of defect in one column.

    Attributes:
        value: of the first row with the defect, shortened.
        error: whether it stops a run.
        count: rows with the defect; 0 if the column itself is wrong.
        rows: the first of them, numbered from 0.
    """

    column: str
    problem: str
    remedy: str
    value: str | None = None
    error: bool = True
    count: int = 0
    rows: list[int] = field(default_factory=list)

    def add_row(self, number: int) -> None:
        """Count one more row with the defect."""
        self.count += 1
        if self.count <= _LISTED_ROWS:
            self.rows.append(number)

    def sentence(self) -> str:
        """Describe row, column, value, defect and remedy in one line."""
        place = f"column {self.column}"
        if self.rows:
            more = f" (and {self.count - 1} more)" if self.count > 1 else ""
            place = f"row {self.rows[0]}{more}, {place}"
        shown = f" = {self.value}" if self.value is not None else ""
        return f"{place}{shown}: {self.problem}; {self.remedy}."


@dataclass(frozen=True)
class TokenLengths:
    """Lengths of the prompts in tokens, chat template included; ``overlong`` counts those above the limit."""

    shortest: int
    mean: float
    longest: int
    overlong: int


@dataclass(frozen=True)
class Inspection:
    """The findings for a file. ``tokens`` is None without a tokenizer or without a usable prompt."""

    rows: int
    findings: list[DataFinding]
    tokens: TokenLengths | None = None

    @property
    def errors(self) -> list[DataFinding]:
        """The findings on which verl would fail or train wrongly."""
        return [finding for finding in self.findings if finding.error]


Chat = list[dict[str, str]]
Measure = Callable[[list[Chat], list[list[Size]]], list[int]]
"""Token counts of chats with images of these sizes. Raises ValueError for a chat that the template rejects."""


def check_configured_files(data: Mapping[str, Any], reads_images: bool = False) -> None:
    """Check every row of a run's parquet files.

    Files on a remote file system, and those read by a data set class of the user's own, are skipped.

    Args:
        data: verl's configuration node of that name.
        reads_images: whether prompts of the model may contain images.

    Raises:
        DataError: verl cannot train on a file.
    """
    if (data.get("custom_cls") or {}).get("path"):
        return
    image_key = (data.get("image_key") or _IMAGES) if reads_images else None
    expected = Expectations(data["prompt_key"], data["reward_fn_key"], image_key=image_key)
    for key in ("train_files", "val_files"):
        files = [data[key]] if isinstance(data[key], str) else list(data[key])
        here = [Path(file).expanduser() for file in files if "://" not in file]
        rows = sum(check_file(path, expected) for path in here)
        _check_alike(here)
        if not files:
            raise DataError(f"data.{key}=[] is invalid: no file. Set it to at least one parquet file.")
        if key == "train_files" and len(here) == len(files):
            _check_batch(data, rows)


def _check_batch(data: Mapping[str, Any], rows: int) -> None:
    """Raise DataError if the rows do not fill one batch: verl leaves out rows that do not."""
    key = "gen_batch_size" if data.get("gen_batch_size") else "train_batch_size"
    if rows < data[key]:
        raise DataError(f"data.train_files: {too_few_rows(rows, data[key], f'data.{key}').sentence()}")


def too_few_rows(rows: int, batch: int, key: str) -> DataFinding:
    """Return the finding for files that do not fill the first batch; `key` is that of the batch size."""
    problem = f"the data has {rows} rows, fewer than {key}={batch}, and verl trains only on whole batches"
    return DataFinding("*", problem, f"set {key} to at most {rows}, or add rows")


def _check_alike(paths: list[Path]) -> None:
    """Raise DataError if a column differs in type between files: verl concatenates the files of a list."""
    first: dict[str, tuple[Path, Any]] = {}
    for path in paths:
        for column in pyarrow.parquet.read_schema(path):
            earlier, known = first.setdefault(column.name, (path, column.type))
            if pyarrow.types.is_null(column.type) or pyarrow.types.is_null(known):
                continue
            if _plain(known) != _plain(column.type):
                raise DataError(
                    f"{path}: column {column.name} is {column.type}, but {known} in {earlier}, and verl cannot combine "
                    f"them; {_CONVERT}."
                )


def _plain(kind: pyarrow.DataType) -> Any:
    """Return a type without the names of list items and the order of fields, which datasets does not compare."""
    if pyarrow.types.is_struct(kind):
        return {kind.field(at).name: _plain(kind.field(at).type) for at in range(kind.num_fields)}
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return [str(kind).partition("<")[0], _plain(kind.value_type)]
    return kind.value_type if pyarrow.types.is_dictionary(kind) else kind


def check_file(path: Path, expected: Expectations = Expectations()) -> int:
    """Check that verl can train on a parquet file and return its number of rows; prompts are not measured.

    Raises:
        DataError: the file cannot be used; the message names the first defect.
    """
    inspection = inspect_file(path, expected)
    if inspection.errors:
        raise DataError(f"{path}: {inspection.errors[0].sentence()}")
    return inspection.rows


def inspect_file(path: Path, expected: Expectations = Expectations(), measure: Measure | None = None) -> Inspection:
    """Check every row of a parquet file.

    Raises:
        DataError: the file is missing, cannot be read as parquet, names a column twice or holds text that is not UTF-8.
    """
    if not path.exists():
        raise DataError(f"The data file {path} does not exist. Check the path.")
    if not path.is_file():
        raise DataError(f"{path} is not a file. Set it to a .parquet file.")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            reject_repeated_columns(path, file.schema_arrow.names)
            findings = list(_column_findings(file.schema_arrow.names, expected))
            if file.metadata.num_rows == 0:
                findings.append(DataFinding("*", "the file has no rows", "use a file with at least one row"))
            if findings:
                return Inspection(file.metadata.num_rows, findings)
            return _inspect_rows(path, file, expected, measure)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{path} is not a readable parquet file ({reason}): {_CONVERT}.") from error


def _column_findings(names: list[str], expected: Expectations) -> Iterator[DataFinding]:
    for column in (expected.reward_fn_key, expected.prompt_key, "reward_model"):
        if column not in names:
            yield DataFinding(column, f"it is missing; the file has the columns {', '.join(names)}", _CONVERT)
    for column in _MEDIA:
        if column in names and column != expected.image_key:
            problem = "verl would turn the row into a multi-modal prompt"
            remedy = "remove the column"
            if column == _IMAGES and expected.image_key is None:
                remedy += ", or train a model that reads images, such as Qwen2.5-VL"
            yield DataFinding(column, problem, remedy)


def _inspect_rows(
    path: Path, file: pyarrow.parquet.ParquetFile, expected: Expectations, measure: Measure | None
) -> Inspection:
    read = [expected.prompt_key, expected.reward_fn_key, "reward_model", "extra_info", expected.image_key]
    columns = [column for column in dict.fromkeys(read) if column in file.schema_arrow.names]
    survey = _Survey(expected, measure)
    for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
        survey.add(rows_of(path, batch, survey.rows))
    return survey.result()


class _Survey:
    """Collects the findings of all rows; defects of one kind become one finding."""

    def __init__(self, expected: Expectations, measure: Measure | None) -> None:
        self._expected = expected
        self._measure = measure
        self._findings: dict[tuple[str, str], DataFinding] = {}
        self._first_rows: dict[str, int] = {}
        self._lengths: list[tuple[int, int]] = []
        self.rows = 0

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Check the next rows of the file."""
        sound: list[tuple[int, Chat, list[Size]]] = []
        for number, row in enumerate(rows, start=self.rows):
            chat = row[self._expected.prompt_key]
            defects = list(_prompt_defects(self._expected.prompt_key, chat))
            if not defects:
                sizes: list[Size] = []
                defects = list(_image_defects(self._expected, row, chat, sizes))
                if not any(defect.error for defect in defects):
                    sound.append((number, chat, sizes))
                defects += self._repetition(number, chat, row.get(self._expected.image_key or ""))
            defects += _answer_defects(row.get("reward_model"))
            defects += _source_defects(self._expected.reward_fn_key, row[self._expected.reward_fn_key])
            if "extra_info" in row:
                defects += _extra_info_defects(row["extra_info"])
            for defect in defects:
                self._findings.setdefault((defect.column, defect.problem), defect).add_row(number)
        self.rows += len(rows)
        if self._measure is not None and sound:
            numbers, chats, images = map(list, zip(*sound, strict=True))
            self._lengths += zip(numbers, self._measure(chats, images), strict=True)

    def _repetition(self, number: int, chat: Chat, images: Any) -> Iterator[DataFinding]:
        asked = hashlib.sha256(repr((chat, images)).encode(errors="surrogatepass")).hexdigest()
        first = self._first_rows.setdefault(asked, number)
        if first != number:
            remedy = "remove repeated rows unless they are meant to count more than once"
            column, shown = self._expected.prompt_key, _shown(chat[-1]["content"])
            yield DataFinding(column, "an earlier row has the same prompt", remedy, shown, error=False)

    def result(self) -> Inspection:
        """Return the findings and the token lengths."""
        findings = list(self._findings.values())
        if not self._lengths:
            return Inspection(self.rows, findings)
        limit = self._expected.max_prompt_length
        overlong = [(number, length) for number, length in self._lengths if length > limit]
        if overlong:
            findings.append(self._overlong_finding(overlong))
        lengths = [length for _, length in self._lengths]
        tokens = TokenLengths(min(lengths), sum(lengths) / len(lengths), max(lengths), len(overlong))
        return Inspection(self.rows, findings, tokens)

    def _overlong_finding(self, overlong: list[tuple[int, int]]) -> DataFinding:
        limit, left = self._expected.max_prompt_length, len(self._lengths) - len(overlong)
        longest = max(length for _, length in overlong)
        fails = not self._expected.filter_overlong_prompts or left == 0
        remedy = f"raise data.max_prompt_length to {longest}"
        if not self._expected.filter_overlong_prompts:
            remedy += " or set data.filter_overlong_prompts=true"
        elif left:
            remedy = f"verl drops them and trains on {left} rows"
        finding = DataFinding(
            self._expected.prompt_key,
            f"it has more tokens than data.max_prompt_length={limit}; the longest prompt has {longest}",
            remedy,
            f"{overlong[0][1]} tokens",
            fails,
        )
        for number, _ in overlong:
            finding.add_row(number)
        return finding


def _prompt_defects(column: str, chat: Any) -> Iterator[DataFinding]:
    if not isinstance(chat, list) or not chat:
        remedy = f"a prompt is a list of messages with role and content; {_CONVERT}"
        yield DataFinding(column, "it is not a chat" if chat != [] else "it has no message", remedy, _shown(chat))
        return
    for message in chat:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            yield DataFinding(column, "a message lacks role or content", _CONVERT, _shown(message))
            return
        if message["role"] not in _ROLES:
            remedy = f"use one of {', '.join(_ROLES)}"
            yield DataFinding(f"{column}.role", "chat templates do not know this role", remedy, _shown(message["role"]))
            return
        if not isinstance(message["content"], str) or not message["content"].strip():
            remedy = "fill in the message text or remove the row"
            yield DataFinding(f"{column}.content", "it is empty or not text", remedy, _shown(message["content"]))
            return
    if chat[-1]["role"] == "assistant":
        remedy = "end the prompt with the user's message"
        yield DataFinding(f"{column}.role", "the model would answer its own message", remedy, _shown("assistant"))


def _image_defects(
    expected: Expectations, row: Mapping[str, Any], chat: Chat, sizes: list[Size]
) -> Iterator[DataFinding]:
    """Yield the defects of a row's images; append their sizes to `sizes`."""
    column, places = expected.image_key, placeholders(chat)
    if column is None:
        return
    if column not in row:
        if places:
            remedy = f"add the images to each row, or set data.image_key to their column; {_CONVERT}"
            yield DataFinding(column, f"the prompt has {PLACEHOLDER}, but the file has no such column", remedy)
        return
    images = row[column]
    if not isinstance(images, list) or not images:
        remedy = "move rows without images into files without the column, which verl expects in every row of a file"
        yield DataFinding(column, "it has no image", remedy, _shown(images))
        return
    if len(images) != places:
        problem = f"the prompt has {PLACEHOLDER} {places} times, but each image of the row needs one"
        remedy = f"write {PLACEHOLDER} once for each image, at its place"
        yield DataFinding(column, problem, remedy, f"{len(images)} images")
    for image in images:
        try:
            size = image_size(image)
            expected.image_tokens.count(size)
        except ImageError as error:
            yield DataFinding(column, f"an image {error}", "correct the image or remove the row")
            return
        sizes.append(size)
        yield from _pixel_remarks(column, expected.image_tokens, size)


def _pixel_remarks(column: str, tokens: ImageTokens, size: Size) -> Iterator[DataFinding]:
    """Yield a finding for an image that the processor resizes beyond rounding."""
    pixels, shown = size[0] * size[1], f"{size[0]}x{size[1]} pixels"
    if pixels < tokens.least:
        problem = f"the processor enlarges an image below its min_pixels={tokens.least}"
        yield DataFinding(
            column, problem, "lower min_pixels in preprocessor_config.json to keep it", shown, error=False
        )
    elif pixels > tokens.most:
        problem = f"the processor shrinks an image above its max_pixels={tokens.most}"
        yield DataFinding(
            column, problem, "raise max_pixels in preprocessor_config.json to keep it", shown, error=False
        )


def _answer_defects(reward_model: Any) -> Iterator[DataFinding]:
    column = "reward_model.ground_truth"
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        remedy = f"the rule reward compares answers with it; {_CONVERT}"
        yield DataFinding(column, "reward_model has no field ground_truth", remedy, _shown(reward_model))
        return
    truth = reward_model["ground_truth"]
    if isinstance(truth, bool) or not isinstance(truth, str | int | float):
        yield DataFinding(column, "it is neither text nor a number", "write the answer as text", _shown(truth))
    elif isinstance(truth, float) and not math.isfinite(truth):
        yield DataFinding(column, "it is not a number", "fill in the answer or remove the row", _shown(truth))
    elif not is_answer(str(truth)):
        remedy = "no response can be correct; fill in the answer or remove the row"
        yield DataFinding(column, "it is empty or NaN", remedy, _shown(truth))
    elif "####" in str(truth):
        remedy = f"only the answer itself can be compared; {_CONVERT}"
        yield DataFinding(column, "it is a worked solution of GSM8K, not an answer", remedy, _shown(truth))


def _source_defects(column: str, source: Any) -> Iterator[DataFinding]:
    if not isinstance(source, str) or not source.strip():
        yield DataFinding(column, "it is empty or not text", "name the source of the row", _shown(source))


def _extra_info_defects(extra_info: Any) -> Iterator[DataFinding]:
    if not isinstance(extra_info, dict):
        remedy = "set it to a record such as {index: 0} in every row, or remove the column"
        yield DataFinding("extra_info", "verl reads fields of it", remedy, _shown(extra_info))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
