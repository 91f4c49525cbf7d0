"""Dump files are read back as written, ranks' parts are merged, and damaged files get a one-line error."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from post_training.mismatch import points
from post_training.mismatch.dumps import (
    Captured,
    DumpError,
    merged,
    read_dump,
    read_part,
    write_dump,
    write_part,
)
from post_training.mismatch.points import of_layer
from tests.post_training.mismatch.synthetic import dump


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_read_dump_equals_the_written_one(tmp_path, dtype):
    given = dump("rollout", dtype)
    given = replace(given, header=replace(given.header, about="a test", replicas={points.LOGITS: 0.5}))
    write_dump(tmp_path / "deep" / "dump", given)
    found = read_dump(tmp_path / "deep" / "dump")
    assert (found.header, found.sequences) == (given.header, given.sequences)
    assert found.points.keys() == given.points.keys()
    for point, captured in found.points.items():
        assert torch.equal(captured.rows, given.points[point].rows)
        assert torch.equal(captured.values, given.points[point].values)
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["dump"]


def captured(rows, *values):
    return Captured(torch.tensor(rows), torch.tensor(values))


def test_parts_of_ranks_become_one(tmp_path):
    """Merge rows of sequence-parallel ranks, vocabulary columns of tensor-parallel ranks, and replicas."""
    norm = of_layer(0, points.MLP_NORM)
    parts = [
        {(norm, 0): captured([2, 0], [2.0], [0.0]), (points.LOGITS, 0): captured([1, 0], [10.0, 11.0], [0.0, 1.0])},
        {(norm, 0): captured([1, 2], [1.0], [2.0]), (points.LOGITS, 2): captured([0, 1], [2.0], [12.0])},
    ]
    for number, part in enumerate(parts):
        write_part(tmp_path / str(number), part)
    found, replicas = merged(read_part(tmp_path / str(number)) for number in range(2))
    assert found[norm].rows.tolist() == [0, 1, 2] and found[norm].values.flatten().tolist() == [0, 1, 2]
    assert found[points.LOGITS].values.tolist() == [[0, 1, 2], [10, 11, 12]]
    assert replicas == {}


def test_differing_copies_reported():
    point = of_layer(0, points.MLP)
    parts = [{(point, 0): captured([5, 3], [4.0], [1.0])}, {(point, 0): captured([5], [6.0])}]
    found, replicas = merged(parts)
    assert found[point].values.flatten().tolist() == [1, 4]
    assert replicas == {point: pytest.approx(0.5)}


def test_columns_of_other_tokens_rejected():
    parts = [{(points.LOGITS, 0): captured([0], [1.0])}, {(points.LOGITS, 1): captured([1], [1.0])}]
    with pytest.raises(DumpError, match="different tokens"):
        merged(parts)


def spoilt(path, tensors=None, header=None):
    """Write a dump's file with changed tensors and header, and return its path."""
    write_dump(path, dump())
    found = load_file(path)
    found |= tensors or {}
    said = {"format": "activations 1", "side": "training", "dtype": "float32", "architecture": "A", "layers": 2}
    said |= {"temperature": 1.0, "replicas": {}, "about": ""} | (header or {})
    save_file({name: value for name, value in found.items() if value is not None}, path, {"header": json.dumps(said)})
    return path


@pytest.mark.parametrize(
    ("tensors", "header", "word"),
    [
        ({}, {"format": "activations 2"}, "another format"),
        ({}, {"side": "both"}, "of rollout or training"),
        ({}, {"colour": 1}, "not a dump"),
        ({"lengths": None}, {}, "not a dump"),
        ({"lengths": torch.tensor([[3, 4]])}, {}, "not a dump"),
        ({"embedding.rows": None}, {}, "not a dump"),
        ({"embedding.rows": torch.arange(10).flip(0)}, {}, "rows of embedding"),
        ({"embedding.rows": torch.arange(10) + 1}, {}, "rows of embedding"),
        ({"embedding": torch.zeros(9, 8)}, {}, "rows of embedding"),
        ({"embedding": torch.zeros(10, 8, dtype=torch.int64)}, {}, "not activations"),
        ({"layers.0.nose": torch.zeros(10, 8), "layers.0.nose.rows": torch.arange(10)}, {}, "not a point"),
    ],
)
def test_files_that_are_no_dumps_rejected_in_a_sentence(tmp_path, tensors, header, word):
    with pytest.raises(DumpError, match=word) as rejected:
        read_dump(spoilt(tmp_path / "dump", tensors, header))
    assert "\n" not in str(rejected.value) and str(tmp_path) in str(rejected.value)


def test_missing_and_cut_files_rejected_in_a_sentence(tmp_path):
    with pytest.raises(DumpError, match="cannot be read"):
        read_dump(tmp_path / "nothing")
    write_dump(tmp_path / "dump", dump())
    content = (tmp_path / "dump").read_bytes()
    for length in (0, 20, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(DumpError, match="cut off"):
            read_dump(tmp_path / "cut")
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(DumpError, match="not a dump"):
        read_dump(tmp_path / "other")
