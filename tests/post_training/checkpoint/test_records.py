"""Records are filled by their shards in any arrangement, and files contain no superfluous byte."""

import pytest
import torch

from post_training.checkpoint.records import Record
from post_training.checkpoint.shard_conversion import grouped
from post_training.layouts.layout import PADDING, LocalView, Shard


class Counting:
    """A source that fills the requested slices with 1, 2, 3, ... in the order of requests."""

    asked = 0

    def read_into(self, hf_name, bounds, out):
        self.asked += 1
        out.fill_(self.asked)


def interleaved(*hf_name: str) -> Record:
    """Make a (2, 2 * n) float32 record with two columns per shard, so that shards interleave in memory."""
    shards = tuple(
        Shard(name, ((0, 2), (0, 2)), "weight", LocalView(index=((0, 2), (2 * place, 2 * place + 2))))
        for place, name in enumerate(hf_name)
    )
    return Record("weight", torch.float32, (2, 2 * len(hf_name)), shards)


@pytest.mark.parametrize("padding", [0, 1, 2])
def test_padding_is_zero_and_what_follows_it_is_written(padding):
    names = ["a", "b", "c"]
    names[padding] = PADDING
    streamed = b"".join(bytes(view) for view in interleaved(*names).stream(Counting()))
    expected = [1.0, 2.0]
    expected.insert(padding, 0.0)
    assert (
        torch.frombuffer(bytearray(streamed), dtype=torch.float32).view(2, 3, 2).tolist()
        == [[[value] * 2 for value in expected]] * 2
    )


@pytest.mark.parametrize(
    ("file_bytes", "groups"), [(7, [1, 1, 1]), (8, [2, 1]), (11, [2, 1]), (12, [3]), (3, [1, 1, 1])]
)
def test_file_size_limit_is_exact(file_bytes, groups):
    records = [Record(name, torch.float32, (1,), ()) for name in "abc"]
    files = grouped(records, file_bytes)
    assert [len(file.records) for file in files] == groups
    assert [record for file in files for record in file.records] == records
    assert files[-1].path == f"model-{len(groups):05d}-of-{len(groups):05d}.safetensors"


def test_shards_beside_a_longer_one_are_written_with_it():
    """One shard is a column over all rows, the others are the rest of each row; only the last starts after its end."""
    column = Shard("column", ((0, 3), (0, 1)), "weight", LocalView(index=((0, 3), (0, 1))))
    rows = [
        Shard(f"row {row}", ((0, 1), (0, 3)), "weight", LocalView(index=((row, row + 1), (1, 4)))) for row in range(3)
    ]
    record = Record("weight", torch.float32, (3, 4), (column, *rows))
    streamed = b"".join(bytes(view) for view in record.stream(Counting()))
    values = torch.frombuffer(bytearray(streamed), dtype=torch.float32).view(3, 4)
    assert values.tolist() == [[1, 2, 2, 2], [1, 3, 3, 3], [1, 4, 4, 4]]
    assert (record.buffer_bytes, record.nbytes) == (4 * 9, 4 * 12)


@pytest.mark.parametrize("wrong", [[0, 1], [1, 2], [0, 2], [0, 1, 2, 2], []])
def test_layout_with_a_gap_or_an_overlap_is_rejected(wrong):
    rows = [Shard("row", ((0, 1), (0, 4)), "weight", LocalView(index=((row, row + 1),))) for row in range(3)]
    record = Record("weight", torch.float32, (3, 4), tuple(rows[row] for row in wrong))
    with pytest.raises(ValueError, match="^weight: its layout (leaves a gap or overlaps|ends) at element"):
        list(record.segments())
