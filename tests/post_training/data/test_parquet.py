"""Parquet files are read back as written, and a failed write leaves nothing partial."""

import pyarrow
import pyarrow.parquet
import pytest

from post_training.data import Problem, to_row
from post_training.data.inspection import check_file
from post_training.data.parquet import SCHEMA, write_files

ROWS = [to_row(Problem(f"{n}+1", str(n + 1)), n, "train", "own", "") for n in range(3)]


def test_rows_come_back(tmp_path):
    train, test = tmp_path / "deep" / "train.parquet", tmp_path / "deep" / "test.parquet"
    write_files({train: ROWS, test: ROWS[:1]})
    assert check_file(train) == 3 and check_file(test) == 1
    assert pyarrow.parquet.read_table(train).to_pylist() == ROWS
    assert pyarrow.parquet.read_schema(train).names == SCHEMA.names


@pytest.mark.parametrize("failing", [0, 1])
def test_failed_write_leaves_both_old_files_and_nothing_else(tmp_path, monkeypatch, failing):
    paths = [tmp_path / "train.parquet", tmp_path / "test.parquet"]
    write_files(dict.fromkeys(paths, ROWS))
    before = [path.read_bytes() for path in paths]
    rows = [ROWS[:1], ROWS[:1]]
    rows[failing] = [{**ROWS[0], "extra_info": {"index": "no number"}}]
    with pytest.raises(pyarrow.ArrowException):
        write_files(dict(zip(paths, rows, strict=True)))
    calls, write = [], pyarrow.parquet.write_table

    def fill_disk(table, path):
        calls.append(path)
        if len(calls) == failing + 1:
            raise OSError("disk full")
        write(table, path)

    monkeypatch.setattr(pyarrow.parquet, "write_table", fill_disk)
    with pytest.raises(OSError, match="disk full"):
        write_files(dict.fromkeys(paths, ROWS[:1]))
    assert [path.read_bytes() for path in paths] == before
    assert {entry.name for entry in tmp_path.iterdir()} == {"train.parquet", "test.parquet"}


def test_content_is_on_the_disk_before_a_file_gets_its_name(tmp_path, monkeypatch):
    import os

    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("sync"), fsync(descriptor))[1])
    monkeypatch.setattr(os, "replace", lambda *names: (events.append("name"), replace(*names))[1])
    write_files({tmp_path / "train.parquet": ROWS, tmp_path / "test.parquet": ROWS})
    assert events == ["sync", "sync", "name", "name", "sync"]
