"""The folder of a recorded step is read back as written, and a damaged one is rejected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from post_training.masking import MASK, masked
from verl_plugin.step_record.folder import Column, RecordedStep, RecordError, read_record, write_record

SECRET = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"


@pytest.fixture
def record() -> RecordedStep:
    """A record of three samples, one with an empty answer."""
    tokens = [torch.arange(4), torch.arange(1), torch.zeros(0, dtype=torch.int64)]
    experts = [torch.randint(0, 8, (len(each), 2, 4), dtype=torch.uint8) for each in tokens]
    columns = {
        "tokens": Column(tokens, True),
        "experts": Column(experts, True),
        "log_probs": Column(
            [torch.tensor([-0.5, float("nan")]).repeat(2), *[each.double() for each in tokens[1:]]], True
        ),
        "score": Column(list(torch.tensor([0.5, 1.0, 0.0])), False),
    }
    columns["log_probs"] = Column([row.float() for row in columns["log_probs"].rows], True)
    metrics = {"actor/grad_norm": float("inf"), "actor/pg_loss": -0.25}
    config = masked({"trainer": {"nnodes": 1}, "token": SECRET})
    return RecordedStep(3, ["a_0_0", "a_1_0", "b_0_0"], columns, {"temperature": 1.0}, metrics, config, 4, ["prompt"])


@pytest.fixture
def written(record, tmp_path) -> Path:
    """The folder of a record with the weights of a checkpoint."""
    (tmp_path / "actor" / "huggingface").mkdir(parents=True)
    (tmp_path / "actor" / "huggingface" / "config.json").write_text("{}")
    (tmp_path / "actor" / "model.pt").write_bytes(b"weights")
    write_record(tmp_path / "step_3", record, tmp_path / "actor", most_mib=1)
    return tmp_path / "step_3"


def test_read_record_equals_the_written_one(record, written):
    found, weights = read_record(written)
    for name in ("step", "keys", "given", "metrics", "config", "dies", "left_out"):
        assert getattr(found, name) == getattr(record, name)
    assert found.columns.keys() == record.columns.keys()
    for name, column in record.columns.items():
        assert found.columns[name].jagged == column.jagged
        for row, expected in zip(found.columns[name].rows, column.rows, strict=True):
            assert row.dtype == expected.dtype and torch.equal(row.nan_to_num(9), expected.nan_to_num(9))
    assert (weights / "model.pt").read_bytes() == b"weights"
    assert SECRET not in (written / "record.json").read_text() and MASK in (written / "record.json").read_text()


def test_weights_outlive_the_checkpoint_and_take_no_space(written, tmp_path):
    assert (written / "weights" / "model.pt").samefile(tmp_path / "actor" / "model.pt")
    shutil.rmtree(tmp_path / "actor")
    assert read_record(written)[1].joinpath("model.pt").read_bytes() == b"weights"


def _damage(folder: Path) -> None:
    content = bytearray((folder / "samples.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "samples.safetensors").write_bytes(content)


def _of_another_format(folder: Path) -> None:
    content = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps({**content, "format": 2}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_damage, "samples.safetensors is damaged"),
        (lambda folder: (folder / "samples.safetensors").unlink(), "samples.safetensors is missing"),
        (lambda folder: (folder / "record.json").unlink(), "record.json cannot be read"),
        (lambda folder: (folder / "record.json").write_text("[]"), "record.json cannot be read"),
        (lambda folder: shutil.rmtree(folder / "weights"), "weights is missing"),
        (_of_another_format, "another format than 1"),
    ],
)
def test_damaged_record_says_so(written, damage, says):
    damage(written)
    with pytest.raises(RecordError) as caught:
        read_record(written)
    assert says in str(caught.value)


def test_nothing_is_left_of_a_record_that_cannot_be_written(record, tmp_path, monkeypatch):
    with pytest.raises(RecordError, match="record_max_mib=0"):
        write_record(tmp_path / "step_3", record, None, most_mib=0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("verl_plugin.step_record.folder.write_text_durably", full)
    with pytest.raises(OSError, match="No space"):
        write_record(tmp_path / "step_3", record, None, most_mib=1)
    assert list(tmp_path.iterdir()) == []
