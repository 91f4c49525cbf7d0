"""The launch skew benchmark: the batch that it distributes, each rank's share, and its output."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import ray
from verl.single_controller.base.decorator import dispatch_megatron_compute_data_proto

from benchmarks.launch_skew import WAYS, SharingWorkerGroup, Turn, batch_of, main, report, with_ids
from verl_patches.features.sample_handles.handles import COUNTED, DriverOfHandles


def test_a_sample_is_as_large_as_the_reference_policy_gets_it():
    """A sample has 1024 prompt tokens, 3072 response tokens and as long a mask, and three tensors of 4096, as int64."""
    batch = batch_of(2, 4096)
    assert sum(tensor.nbytes for tensor in batch.batch.values()) == 2 * 8 * (1024 + 2 * 3072 + 3 * 4096)


def test_ranks_next_to_each_other_share_a_part():
    with mock.patch.object(ray, "put", lambda part: part):
        (parts,), _ = dispatch_megatron_compute_data_proto(SharingWorkerGroup([None] * 8, sharing=4), batch_of(6, 4))
    assert [len(part) for part in parts] == [3] * 8
    assert [part is parts[0] for part in parts] == [True] * 4 + [False] * 4


def test_the_ratio_is_of_neighbouring_turns(capsys):
    skews = dict.fromkeys(WAYS, (1.0, 1.0, 1.0)) | {"pinned": (4.0, 8.0, 2.0), "sample handles": (1.0, 0.4, 0.4)}
    report([Turn(way, skews[way][turn], 1.0, 10) for turn in range(3) for way in WAYS], samples=2)
    printed = capsys.readouterr().out
    assert "skew with shared chunks: 0.25 of the pinned way's" in printed
    assert "skew with sample handles: 0.20 of the pinned way's" in printed


def test_handles_are_a_small_part_of_the_batch_that_they_stand_for():
    batch = batch_of(8, 64)
    handles = DriverOfHandles(lambda each: each, lambda: 1).handles(with_ids(batch))
    assert handles.batch[COUNTED].tolist() == [48] * 8 and len(handles) == 8
    assert sum(tensor.nbytes for tensor in handles.batch.values()) == 8 * 20


@pytest.mark.parametrize("arguments", [("--actors", "6", "--sharing", "4"), ("--samples", "7", "--sharing", "4")])
def test_indivisible_samples_rejected(arguments, capsys):
    with mock.patch.object(sys, "argv", ["launch_skew.py", *arguments]), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "cannot be divided among" in capsys.readouterr().err
