"""Summing the meters of several processes."""

import json

import pytest

from post_training.report.meters import read_meters


def snapshot(count, peak, **phases):
    """Return a process's counters in the format that npu_emulator.meters writes."""
    counted = {"count": count, "bytes": 10 * count}
    return {
        "pid": 1,
        "operators": {"aten::mm": {"calls": count}, "aten::add": {"calls": 1}},
        "copies": {"host_to_device": counted, "device_to_host": {"count": 0, "bytes": 0}},
        "collectives": {"all_reduce": {"2": counted, "4": counted}},
        "memory": {"0": {"allocated": 1, "peak_allocated": peak, "allocations": 3}},
        "phases": {name: {"peak_bytes": {"0": size}} for name, size in phases.items()},
    }


def test_sums_and_peaks(tmp_path):
    (tmp_path / "1.json").write_text(json.dumps(snapshot(2, 100, update=50)))
    (tmp_path / "2.json").write_text(json.dumps(snapshot(3, 70, update=60, rollout=5)))
    (tmp_path / "3.json.part").write_text("{")
    assert read_meters(tmp_path) == {
        "processes": 2,
        "collectives": {"all_reduce": {"count": 10, "bytes": 100}},
        "copies": {"host_to_device": {"count": 5, "bytes": 50}, "device_to_host": {"count": 0, "bytes": 0}},
        "operator_calls": 7,
        "peak_device_bytes": {"run": 100, "update": 60, "rollout": 5},
    }


def test_without_an_emulator_there_are_none(tmp_path):
    assert read_meters(tmp_path / "absent") is None


def test_the_emulators_own_snapshot_is_understood(tmp_path):
    pytest.importorskip("npu_emulator.meters")
    import torch
    import torch_npu  # noqa: F401

    from npu_emulator import meters

    with meters.phase("step"):
        torch.ones(256, device="npu").add_(1)
    meters.write(str(tmp_path))
    read = read_meters(tmp_path)
    assert read["processes"] == 1 and read["operator_calls"] > 0 and read["peak_device_bytes"]["step"] >= 1024
