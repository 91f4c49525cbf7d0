"""The parquet files: what verl reads back, and the check that refuses what it cannot read."""

import pyarrow
import pyarrow.parquet
import pytest

from verl_patches.features.dataset import DataError, Problem, to_row
from verl_patches.features.dataset.parquet import SCHEMA, check_file, write_rows

ROWS = [to_row(Problem(f"{n}+1", str(n + 1)), n, "train", "own", "") for n in range(3)]


def test_rows_come_back(tmp_path):
    path = tmp_path / "deep" / "train.parquet"
    write_rows(path, ROWS)
    assert check_file(path) == 3
    assert pyarrow.parquet.read_table(path).to_pylist() == ROWS
    assert pyarrow.parquet.read_schema(path).names == SCHEMA.names


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "train.parquet"
    write_rows(path, ROWS)
    before = path.read_bytes()
    with pytest.raises(pyarrow.ArrowException):
        write_rows(path, [{**ROWS[0], "extra_info": {"index": "no number"}}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyarrow.parquet, "write_table", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            write_rows(path, ROWS[:1])
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.parquet"]


def test_gsm8ks_own_parquet_is_refused_before_verl_fails_on_it(tmp_path):
    path = tmp_path / "raw.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["x"], "answer": ["#### 1"]}), path)
    with pytest.raises(DataError, match="lacks data_source, prompt, reward_model"):
        check_file(path)


def test_other_unusable_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        check_file(tmp_path / "absent.parquet")
    (tmp_path / "text.parquet").write_text("no parquet at all")
    with pytest.raises(DataError, match="is not a parquet file"):
        check_file(tmp_path / "text.parquet")
    write_rows(tmp_path / "empty.parquet", [])
    with pytest.raises(DataError, match="holds no rows"):
        check_file(tmp_path / "empty.parquet")
    table = pyarrow.table({"data_source": ["x"], "prompt": ["p"], "reward_model": ["1"]})
    pyarrow.parquet.write_table(table, tmp_path / "flat.parquet")
    with pytest.raises(DataError, match="no field ground_truth"):
        check_file(tmp_path / "flat.parquet")
