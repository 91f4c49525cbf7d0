"""The check of parquet files names every defect on which verl fails or trains wrongly, with row and remedy."""

import copy
import math

import pyarrow
import pyarrow.parquet
import pytest

from post_training.data import DataError, Problem, to_row
from post_training.data.inspection import Expectations, check_configured_files, check_file, inspect_file

SOUND = [to_row(Problem(f"{n}+1", str(n + 1)), n, "train", "own", "") for n in range(4)]


def write(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def changed(row, column, value):
    """Return the valid rows with one value replaced; a dot in `column` leads into a record."""
    rows = copy.deepcopy(SOUND)
    outer, _, inner = column.partition(".")
    if inner:
        rows[row][outer][inner] = value
    else:
        rows[row][outer] = value
    return rows


def everywhere(column, value):
    """Return the valid rows with a column's value replaced in every row, as Arrow needs one type per column."""
    return [{**row, column: value} for row in SOUND]


def test_sound_file_passes(tmp_path):
    path = write(tmp_path / "sound.parquet", SOUND)
    inspection = inspect_file(path)
    assert inspection.rows == check_file(path) == 4
    assert inspection.findings == [] and inspection.tokens is None


def test_columns_that_verl_does_not_need_may_be_absent(tmp_path):
    needed = [{name: row[name] for name in ("data_source", "prompt", "reward_model")} for row in SOUND]
    assert check_file(write(tmp_path / "bare.parquet", needed)) == 4


USER = {"role": "user", "content": "1+1"}
DEFECTS = {
    "prompt is text": (everywhere("prompt", "1+1"), 0, "prompt", "not a chat", "json_to_parquet"),
    "prompt is null": (changed(2, "prompt", None), 2, "prompt", "not a chat", "json_to_parquet"),
    "prompt is empty": (changed(2, "prompt", []), 2, "prompt", "no message", "json_to_parquet"),
    "message without content": (everywhere("prompt", [{"role": "user"}]), 0, "prompt", "lacks role or content", ""),
    "content is null": (changed(1, "prompt", [{"role": "user", "content": None}]), 1, "prompt.content", "empty", ""),
    "content is blank": (changed(3, "prompt", [{"role": "user", "content": " "}]), 3, "prompt.content", "empty", ""),
    "unknown role": (changed(1, "prompt", [{"role": "human", "content": "x"}]), 1, "prompt.role", "'human'", "user"),
    "assistant last": (changed(1, "prompt", [USER, {**USER, "role": "assistant"}]), 1, "prompt.role", "own", ""),
    "no reward record": (everywhere("reward_model", "2"), 0, "reward_model.ground_truth", "no field ground_truth", ""),
    "no truth": (everywhere("reward_model", {"style": "rule"}), 0, "reward_model.ground_truth", "no field", "convert"),
    "truth is null": (changed(3, "reward_model.ground_truth", None), 3, "reward_model.ground_truth", "None", "as text"),
    "truth is empty": (changed(1, "reward_model.ground_truth", " "), 1, "reward_model.ground_truth", "empty", "remove"),
    "truth is nan": (changed(2, "reward_model.ground_truth", "nan"), 2, "reward_model.ground_truth", "NaN", "remove"),
    "truth is NaN in text": (
        changed(1, "reward_model.ground_truth", r"\text{NaN}"), 1, "reward_model.ground_truth", "NaN", "fill in",
    ),
    "truth is an empty box": (
        changed(1, "reward_model.ground_truth", r"\boxed{}"), 1, "reward_model.ground_truth", "is empty", "fill in",
    ),
    "truth is no number": (
        everywhere("reward_model", {"ground_truth": math.nan}), 0, "reward_model.ground_truth", "nan", "remove the row",
    ),
    "truth is infinite": (
        everywhere("reward_model", {"ground_truth": math.inf}), 0, "reward_model.ground_truth", "inf", "remove the row",
    ),
    "truth is a list": (everywhere("reward_model", {"ground_truth": [2]}), 0, "reward_model.ground_truth", "[2]", ""),
    "truth is a solution": (
        changed(2, "reward_model.ground_truth", "1 + 1\n#### 2"), 2, "reward_model.ground_truth", "GSM8K", "convert",
    ),
    "source is null": (changed(0, "data_source", None), 0, "data_source", "None", "name the source"),
    "extra_info is null": (changed(2, "extra_info", None), 2, "extra_info", "reads fields", "remove the column"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_named_with_row_column_value_and_remedy(tmp_path, name):
    rows, row, column, words, remedy = DEFECTS[name]
    path = write(tmp_path / "defect.parquet", rows)
    (finding,) = inspect_file(path).errors
    assert finding.rows[0] == row and finding.column == column
    assert words in finding.sentence() and remedy in finding.remedy
    with pytest.raises(DataError, match=f"row {row}") as caught:
        check_file(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_rows_with_one_defect_are_counted_together(tmp_path):
    rows = [{**SOUND[0], "data_source": None if n % 2 else "own"} for n in range(5000)]
    (finding,) = inspect_file(write(tmp_path / "many.parquet", rows)).errors
    assert finding.count == 2500 and finding.rows[:3] == [1, 3, 5] and len(finding.rows) == 20
    assert finding.sentence().startswith("row 1 (and 2499 more), column data_source = None:")


def test_rows_are_numbered_through_the_whole_file(tmp_path):
    rows = [{**SOUND[0], "data_source": None if n == 3000 else "own"} for n in range(4000)]
    (finding,) = inspect_file(write(tmp_path / "long.parquet", rows)).errors
    assert finding.rows == [3000]


def test_repeated_prompts_are_a_note_and_no_error(tmp_path):
    inspection = inspect_file(write(tmp_path / "twice.parquet", [*SOUND, SOUND[1]]))
    (finding,) = inspection.findings
    assert inspection.errors == [] and finding.rows == [4] and "same prompt" in finding.problem


@pytest.mark.parametrize("column", ["images", "videos"])
def test_columns_of_media_rejected(tmp_path, column):
    with pytest.raises(DataError, match=f"column {column}: verl would turn the row into a multi-modal prompt"):
        check_file(write(tmp_path / "media.parquet", [{**row, column: "x"} for row in SOUND]))


def test_gsm8ks_own_parquet_rejected_before_verl_fails_on_it(tmp_path):
    path = write(tmp_path / "raw.parquet", [{"question": "x", "answer": "#### 1"}])
    findings = inspect_file(path).errors
    assert [finding.column for finding in findings] == ["data_source", "prompt", "reward_model"]
    assert all("question, answer" in finding.problem and "json_to_parquet" in finding.remedy for finding in findings)


def test_other_names_of_columns(tmp_path):
    rows = [{"chat": row["prompt"], "kind": "own", "reward_model": row["reward_model"]} for row in SOUND]
    path = write(tmp_path / "names.parquet", rows)
    assert check_file(path, Expectations(prompt_key="chat", reward_fn_key="kind")) == 4
    with pytest.raises(DataError, match="column data_source"):
        check_file(path)


def test_unreadable_files_rejected(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        check_file(tmp_path / "absent.parquet")
    (tmp_path / "text.parquet").write_text("no parquet at all")
    with pytest.raises(DataError, match="is not a readable parquet file"):
        check_file(tmp_path / "text.parquet")
    sound = write(tmp_path / "cut.parquet", SOUND).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(sound[: len(sound) // 2])
    with pytest.raises(DataError, match="is not a readable parquet file"):
        check_file(tmp_path / "cut.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(SOUND).slice(0, 0), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match="the file has no rows"):
        check_file(tmp_path / "empty.parquet")


def test_columns_of_one_name_rejected(tmp_path):
    table = pyarrow.Table.from_pylist(SOUND)
    twice = pyarrow.Table.from_arrays([*table.columns, table["prompt"]], [*table.column_names, "prompt"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match="has 2 columns named prompt. Keep one of them"):
        check_file(tmp_path / "twice.parquet")


def test_bytes_that_are_no_text_rejected_with_their_row(tmp_path):
    rows = pyarrow.Table.from_pylist([SOUND[n % 4] for n in range(3000)])
    sources = [b"own"] * 3000
    sources[2500] = b"ab\xff"
    broken = pyarrow.array(sources).view(pyarrow.string())
    table = rows.set_column(rows.column_names.index("data_source"), "data_source", broken)
    pyarrow.parquet.write_table(table, tmp_path / "broken.parquet")
    with pytest.raises(DataError, match=r"row 2500, column data_source is not UTF-8 text .byte 2."):
        check_file(tmp_path / "broken.parquet")


def characters(chats, sizes):
    """Count tokens as by a tokenizer whose tokens are the characters of the last message."""
    return [len(chat[-1]["content"]) for chat in chats]


@pytest.mark.parametrize(
    ("limit", "filtered", "errors", "remedy"),
    [
        (8, False, 0, None),
        (7, False, 1, "raise data.max_prompt_length to 8"),
        (7, True, 0, "trains on 3 rows"),
        (2, True, 1, "raise data.max_prompt_length to 8"),
    ],
)
def test_prompts_are_measured_against_the_limit(tmp_path, limit, filtered, errors, remedy):
    path = write(tmp_path / "long.parquet", changed(2, "prompt", [{"role": "user", "content": "1234567+"}]))
    expected = Expectations(max_prompt_length=limit, filter_overlong_prompts=filtered)
    inspection = inspect_file(path, expected, characters)
    assert len(inspection.errors) == errors
    assert (inspection.tokens.shortest, inspection.tokens.longest) == (3, 8)
    assert inspection.tokens.overlong == sum(length > limit for length in (3, 3, 8, 3))
    if remedy:
        assert remedy in inspection.findings[0].remedy
        assert inspection.findings[0].rows[0] == (2 if limit > 3 else 0)


def test_every_file_of_a_run_is_checked(tmp_path):
    sound = str(write(tmp_path / "sound.parquet", SOUND))
    raw = str(write(tmp_path / "raw.parquet", [{"question": "x", "answer": "#### 1"}]))
    data = {
        "train_files": sound,
        "val_files": [sound, "hdfs://x"],
        "prompt_key": "prompt",
        "reward_fn_key": "data_source",
        "train_batch_size": 4,
    }
    check_configured_files(data)
    with pytest.raises(DataError, match="the data has 4 rows, fewer than data.train_batch_size=5"):
        check_configured_files(data | {"train_batch_size": 5})
    with pytest.raises(DataError, match=r"data.val_files=\[\] is invalid: no file"):
        check_configured_files(data | {"val_files": []})
    for changes in ({"train_files": [sound, raw]}, {"val_files": raw}):
        with pytest.raises(DataError, match="raw.parquet"):
            check_configured_files(data | changes)
    check_configured_files(data | {"train_files": raw, "custom_cls": {"path": "own.py"}})
