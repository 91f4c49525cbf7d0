"""``torch.npu``'s functions that use CANN: devices, streams, events, generators, and memory statistics."""

import os

import pytest
import torch
import torch_npu
from torch_npu.npu.utils import is_support_inf_nan, npu_check_overflow

from npu_emulator import meters


def test_devices_are_current_inside_and_given_back_outside():
    assert torch.npu.current_device() == 0
    with torch.npu.device(2), torch.npu.device(None), torch.npu.device_of(torch.ones(1)):
        assert torch.npu.current_device() == 2
        with torch.npu.device_of(torch.ones(1, device="npu:0")):
            assert torch.npu.current_device() == 0
        assert torch.npu.current_device() == 2
        torch.npu.set_device("npu:3")
        assert torch.npu.current_device() == 3
    assert torch.npu.current_device() == 0


def test_dies_that_are_there_reach_each_other():
    last = torch.npu.device_count() - 1
    assert last > 1
    seen = {pair: torch.npu.can_device_access_peer(*pair) for pair in [(0, last), (last, 0), (1, 1)]}
    assert seen == {(0, last): True, (last, 0): True, (1, 1): False}
    for pair in [(0, last + 1), (last + 1, 0), (-1, 0), (0, -1)]:
        with pytest.raises(AssertionError, match="Invalid"):
            torch.npu.can_device_access_peer(*pair)


def test_the_device_describes_itself():
    properties = torch.npu.get_device_properties(1)
    chip = os.environ.get("NPU_EMULATOR_CHIP", "Ascend910_9391")
    assert properties.name == torch.npu.get_device_name(1) == chip
    assert properties.total_memory == torch.npu.mem_get_info(1)[1]
    assert torch_npu.npu.get_soc_version() == {"Ascend910_9391": 250, "Ascend910B3": 223}[chip]
    assert torch.npu.is_bf16_supported() is True and is_support_inf_nan() is True
    assert torch.npu.utilization() == 0


@pytest.mark.parametrize(
    ("gradient", "overflowed"),
    [
        (torch.tensor([1.0, -2.0]), False),
        (torch.tensor([1.0, float("inf")]), True),
        (torch.tensor([float("nan"), 0.0]), True),
    ],
)
def test_overflowed_gradients_are_reported(gradient, overflowed):
    assert npu_check_overflow(gradient.npu()) is overflowed


def test_streams_are_told_apart_by_number_and_device():
    first, second = torch.npu.Stream(), torch.npu.Stream(device="npu:1", priority=-1)
    assert (first.device_index, second.device_index) == (0, 1)
    again = torch.npu.Stream(stream_id=second.stream_id, device_index=1, device_type=second.device_type)
    elsewhere = torch.npu.Stream(stream_id=second.stream_id, device_index=0, device_type=second.device_type)
    assert again == second != elsewhere and first != second
    assert first.npu_stream != second.npu_stream == again.npu_stream
    with torch.npu.stream(second):
        assert torch.npu.current_stream(1) == second and torch.npu.current_device() == 1
        with torch.npu.stream(None):
            assert torch.npu.current_stream(1) == second
    assert torch.npu.current_stream(1) == torch.npu.default_stream(1) and torch.npu.current_device() == 0


def test_events_measure_milliseconds_between_records():
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="Both events must be recorded"):
        start.elapsed_time(end)
    own = torch.npu.Stream()
    own.record_event(start)
    with pytest.raises(RuntimeError, match="Both events must be recorded"):
        start.elapsed_time(end)
    assert own.record_event(end) is end
    torch.npu.synchronize()
    took = start.elapsed_time(end)
    assert took == -end.elapsed_time(start) >= 0
    microseconds = end.recorded_time() - start.recorded_time()
    assert abs(microseconds - 1000 * took) <= 1


def test_every_device_has_a_generator_of_its_own():
    count = torch.npu.device_count()
    assert len(torch.npu.default_generators) == len(torch.npu.get_rng_state_all()) == count
    torch.npu.manual_seed_all(5)
    with torch.npu.device(1):
        torch.npu.manual_seed(6)
        assert torch.npu.initial_seed() == 6
    drawn = [torch.rand(4, device=f"npu:{index}").cpu() for index in range(count)]
    assert all(torch.equal(drawn[0], each) == (index != 1) for index, each in enumerate(drawn))


def test_statistics_of_memory_count_what_is_taken_and_given_back():
    """torch_npu adds 32 bytes to a tensor, and asks CANN for 20 MiB if it is larger than 1 MiB."""
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats(1)
    before = torch.npu.memory_stats(1)
    taken = torch.empty(1 << 20, dtype=torch.uint8, device="npu:1")
    during = torch.npu.memory_stats(1)
    del taken
    after = torch.npu.memory_stats(1)
    for kind in ("allocated", "active"):
        named = f"{kind}_bytes.all."
        assert during[named + "current"] - before[named + "current"] == (1 << 20) + 512
        assert after[named + "current"] == before[named + "current"]
        assert after[named + "peak"] == during[named + "current"]
    assert during["reserved_bytes.all.current"] - before["reserved_bytes.all.current"] == 20 << 20
    assert after["reserved_bytes.all.current"] == torch.npu.memory_reserved(1)
    assert torch.npu.max_memory_allocated(1) == during["allocated_bytes.all.current"]
    growth = {
        name: after[f"allocation.all.{name}"] - before[f"allocation.all.{name}"] for name in ("allocated", "freed")
    }
    assert growth == {"allocated": 1, "freed": 1}
    assert [segment["total_size"] for segment in torch.npu.memory_snapshot() if segment["device"] == 1].count(20 << 20)


def test_a_phase_counts_the_growth_of_every_kind():
    torch.npu.synchronize()
    meters.reset_phases()
    with meters.phase("twice"):
        torch.ones(4, device="npu").cpu()
    with meters.phase("twice"), meters.phase("inner"):
        kept = torch.ones(3 << 20, device="npu:1") * 2
        torch.npu.synchronize(1)
    found = meters.snapshot()["phases"]
    meters.reset_phases()
    assert (found["twice"]["entered"], found["inner"]["entered"]) == (2, 1)
    assert found["twice"]["copies"]["device_to_host"] == {"count": 1, "bytes": 16}
    assert found["inner"]["copies"]["device_to_host"] == {"count": 0, "bytes": 0}
    assert found["inner"]["operators"]["aclnnMuls"]["calls"] == 1
    assert found["twice"]["graphs"] == dict.fromkeys(("captured", "replayed", "tasks"), 0)
    assert found["inner"]["allocated_bytes"]["1"] >= torch.npu.memory_reserved(1) >= kept.nbytes
    assert found["twice"]["peak_bytes"]["1"] == found["inner"]["peak_bytes"]["1"] >= 2 * kept.nbytes
    assert meters.snapshot()["phases"] == {}
