"""What ``torch.npu`` answers to the questions that torch, vLLM and Megatron ask of a device module."""

import datetime
import inspect

import pytest
import torch
import torch_npu
import torchair
from torch._dynamo import device_interface
from torch_npu import _C
from torch_npu._C import _distributed_c10d
from torch_npu.npu.utils import _get_device_index

from npu_emulator import chip, meters
from npu_emulator.operators import emulated


def test_defaults_of_operators_are_those_of_their_schemas():
    """A call through the dispatcher fills in the schema's, a call of the function its own."""
    differing, compared = [], 0
    for name, operator in emulated().items():
        own = inspect.signature(operator.function).parameters
        for argument in torch._C.parse_schema(operator.schema).arguments:
            parameter = own.get(operator.parameters.get(argument.name, argument.name))
            if parameter is None or parameter.default is inspect.Parameter.empty or not argument.has_default_value():
                continue
            compared += 1
            if parameter.default != argument.default_value:
                differing.append(f"{name}({argument.name}={argument.default_value}): {parameter.default}")
    assert differing == [] and compared > 100


@pytest.mark.parametrize(
    ("given", "index"),
    [
        (None, 1),
        (-1, 1),
        (0, 0),
        (3, 3),
        ("npu", 1),
        ("npu:2", 2),
        (torch.device("npu"), 1),
        (torch.device("npu", 0), 0),
    ],
)
def test_a_device_is_given_in_many_forms(given, index):
    with torch.npu.device(1):
        assert _get_device_index(given) == index
    with pytest.raises(ValueError, match="Expected a npu device, but got: cpu"):
        _get_device_index("cpu")


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
    assert torch.npu.device(None).idx == torch.npu.device(1).prev_idx == -1


def test_dies_that_are_there_reach_each_other():
    last = torch.npu.device_count() - 1
    assert last > 1
    seen = {pair: torch.npu.can_device_access_peer(*pair) for pair in [(0, last), (last, 0), (1, 1)]}
    beyond = {
        pair: torch.npu.can_device_access_peer(*pair) for pair in [(0, last + 1), (last + 1, 0), (-1, 0), (0, -1)]
    }
    assert all(seen.values()) and not any(beyond.values())


def test_the_device_describes_itself():
    properties = torch.npu.get_device_properties(1)
    assert properties.name == torch.npu.get_device_name(1) == chip.CHIP.name
    assert properties.total_memory == torch.npu.mem_get_info(1)[1] == torch.npu.memory.mem_get_info("npu:1")[1]
    assert (properties.multi_processor_count, properties.major, properties.minor) == (20, 0, 0)
    assert torch.npu.get_soc_version() == chip.SOC_VERSIONS[chip.CHIP.name]
    assert torch.npu.is_bf16_supported() is True and torch.npu.is_support_inf_nan() is True
    assert torch.npu.get_npu_overflow_flag() is False and torch.npu.get_allocator_backend() == "native"
    assert torch.npu.utilization() == torch.npu.current_blas_handle() == 0 and torch.npu.get_device_capability() is None


@pytest.mark.parametrize(
    ("gradient", "overflowed"),
    [
        (torch.tensor([1.0, -2.0]), False),
        (torch.tensor([1.0, float("inf")]), True),
        (torch.tensor([float("nan"), 0.0]), True),
        (3.0, False),
        (float("-inf"), True),
        (float("nan"), True),
    ],
)
def test_gradients_that_overflowed_are_told(gradient, overflowed):
    assert torch.npu.npu_check_overflow(gradient) is overflowed


def test_streams_are_told_apart_by_number_and_device():
    first, second = torch.npu.Stream(), torch.npu.Stream(device="npu:1", priority=-1)
    assert (first.device_index, second.device_index, second.priority) == (0, 1, -1)
    assert second.device == torch.device("npu", 1) and second.npu_stream == second.stream_id == first.stream_id + 1
    assert torch.npu.Stream(device=torch.device("npu:1"), stream_id=second.stream_id) == second
    assert torch.npu.Stream(device=0, stream_id=second.stream_id) != second != first
    assert len({first, second, torch.npu.Stream(device=0, stream_id=first.stream_id)}) == 2
    assert torch.npu.default_stream(1).stream_id == 0 and torch.npu.default_stream(1) is torch.npu.default_stream(
        "npu:1"
    )
    with torch.npu.stream(second):
        assert torch.npu.current_stream(1) is second and torch.npu.current_stream() is torch.npu.default_stream(0)
        with torch.npu.stream(None):
            assert torch.npu.current_stream(1) is second
    assert torch.npu.current_stream(1) is torch.npu.default_stream(1)
    assert repr(second) == f"<torch_npu.npu.Stream device=npu:1 npu_stream={second.stream_id:#x}>"


def test_events_measure_milliseconds_between_records_that_were_timed():
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="Both events must be recorded"):
        start.elapsed_time(end)
    own = torch.npu.Stream()
    own.record_event(start)
    with pytest.raises(RuntimeError, match="Both events must be recorded"):
        start.elapsed_time(end)
    assert own.record_event(end) is end
    start._reached, end._reached = 1.0, 1.25
    assert start.elapsed_time(end) == 250.0 and end.elapsed_time(start) == -250.0 and end.recorded_time() == 1.25
    with pytest.raises(RuntimeError, match="enable_timing"):
        start.elapsed_time(own.record_event())
    external = torch.npu.ExternalEvent()
    external.record(own)
    external.reset(own)
    assert external.recorded_time() is None


def test_every_device_has_a_generator_of_its_own():
    count = torch.npu.device_count()
    assert len(torch.npu.default_generators) == len(torch.npu.get_rng_state_all()) == count
    torch.npu.manual_seed_all(5)
    with torch.npu.device(1):
        torch.npu.manual_seed(6.0)
        assert torch.npu.initial_seed() == 6
    assert [each.initial_seed() for each in map(torch.npu.default_generators.__getitem__, range(count))] == [
        6 if index == 1 else 5 for index in range(count)
    ]
    before = torch.npu.get_rng_state_all()
    torch.npu.seed_all()
    seeds = {torch.npu.default_generators[index].initial_seed() for index in range(count)}
    assert len(seeds) == 1 and not seeds & {5, 6}
    torch.npu.set_rng_state_all(before)
    assert all(map(torch.equal, before, torch.npu.get_rng_state_all()))
    with torch.npu.device(1):
        torch.npu.seed()
    assert torch.npu.default_generators[0].initial_seed() == 5 != torch.npu.default_generators[1].initial_seed()


def test_statistics_of_memory_count_what_is_taken_and_given_back():
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats(1)
    before = torch.npu.memory_stats(1)
    taken = torch.empty(1 << 20, dtype=torch.uint8, device="npu:1")
    during = torch.npu.memory_stats(1)
    del taken
    after = torch.npu.memory_stats(1)
    for kind in ("allocated", "active"):
        named = f"{kind}_bytes.all."
        assert during[named + "current"] - before[named + "current"] == 1 << 20
        assert after[named + "current"] == before[named + "current"]
        assert after[named + "peak"] == during[named + "current"]
    assert after["reserved_bytes.all.current"] == torch.npu.memory_reserved(1) == torch.npu.memory_cached(1)
    assert after["reserved_bytes.all.peak"] == torch.npu.max_memory_reserved(1) == torch.npu.max_memory_cached(1)
    assert torch.npu.max_memory_allocated(1) == during["allocated_bytes.all.current"]
    growth = {
        name: after[f"allocation.all.{name}"] - before[f"allocation.all.{name}"] for name in ("allocated", "freed")
    }
    assert growth == {"allocated": 1, "freed": 1}
    assert during["allocation.all.current"] == before["allocation.all.current"] + 1
    assert [after[name] for name in ("num_alloc_retries", "inactive_split_bytes.all.current")] == [0, 0]
    lines = torch.npu.memory_summary(1).splitlines()
    assert [line.split()[0] for line in lines] == sorted(after)
    assert f"{after['reserved_bytes.all.peak']:,}" in "\n".join(lines) and {len(line) for line in lines} == {57}
    assert torch.npu.memory_snapshot() == []


@pytest.mark.parametrize("fraction", [-0.1, 1.1])
def test_a_share_of_the_memory_lies_between_none_and_all(fraction):
    with pytest.raises(ValueError, match=f"Invalid fraction value: {fraction}. Allowed range: 0~1"):
        torch.npu.set_per_process_memory_fraction(fraction)


def test_options_are_kept_and_given_back():
    assert torch.npu.is_jit_compile_false() is True and torch.npu.get_mm_bmm_format_nd() is True
    try:
        torch.npu.set_compile_mode(jit_compile=True)
        torch.npu.set_mm_bmm_format_nd(False)
        assert torch.npu.is_jit_compile_false() is False and torch.npu.get_mm_bmm_format_nd() is False
        torch.npu.set_compile_mode()
        torch.npu.set_mm_bmm_format_nd()
        assert torch.npu.is_jit_compile_false() is True and torch.npu.get_mm_bmm_format_nd() is True
        torch.npu.set_option({"jit_compile": True})
        assert torch.npu.is_jit_compile_false() is False
    finally:
        torch.npu.set_compile_mode()
    with pytest.raises(TypeError, match="npu option must be a dict"):
        torch.npu.set_option("jit_compile")
    assert torch.npu.matmul.allow_hf32 is False and torch.npu.conv.allow_hf32 is False


@pytest.mark.parametrize(
    "name", ["Bool", "Byte", "Char", "Short", "Int", "Long", "Half", "BFloat16", "Float", "Double"]
)
def test_legacy_types_are_those_that_torch_has_for_the_host(name):
    legacy, host = getattr(torch.npu, f"{name}Tensor"), getattr(torch, f"{name}Tensor")
    assert legacy.dtype == host.dtype and legacy.__name__ == host.__name__
    made = legacy([1, 0])
    assert isinstance(made, legacy) and made.device.type == "npu" and made.tolist() == host([1, 0]).tolist()
    assert legacy(2, 3).shape == (2, 3) and legacy(2, 3).dtype == host.dtype
    assert not isinstance(made.cpu(), legacy) and not isinstance(3, legacy)


def test_dynamo_is_given_devices_of_its_own_choice():
    interface = device_interface.get_interface_for_device("npu")
    assert interface.exchange_device(2) == 0 and torch.npu.current_device() == 2
    assert interface.maybe_exchange_device(-1) == 2 and torch.npu.current_device() == 2
    assert interface.maybe_exchange_device(0) == 2 and torch.npu.current_device() == 0
    assert interface.get_raw_stream(1) == 0 and interface.get_compute_capability() == chip.CHIP.name
    registered = device_interface.get_registered_device_interfaces()
    assert {name for name, kind in registered if kind is interface} == {
        "npu",
        *(f"npu:{index}" for index in range(torch.npu.device_count())),
    }


def test_autocast_is_asked_and_told_by_the_device_module():
    assert torch.npu.get_amp_supported_dtype() == [torch.float16, torch.bfloat16, torch.float32]
    before = torch.npu.get_autocast_dtype()
    try:
        torch.npu.set_autocast_dtype(torch.bfloat16)
        assert torch.npu.get_autocast_dtype() == torch.bfloat16 and not torch.npu.is_autocast_enabled()
        torch.npu.set_autocast_enabled(True)
        assert torch.npu.is_autocast_enabled() and not torch.is_autocast_enabled("cpu")
    finally:
        torch.npu.set_autocast_enabled(False)
        torch.npu.set_autocast_dtype(before)


def test_groups_wait_as_long_as_torch_npu_says():
    options = _distributed_c10d.ProcessGroupHCCL.Options()
    assert options._timeout == datetime.timedelta(minutes=30) and options.is_high_priority_stream is False
    assert (options.hccl_config, options.global_ranks_in_group, options.group_id) == ({}, [], "")


def test_scopes_carry_their_names_and_are_counted():
    switch, kernel = torchair.scope.npu_stream_switch("a"), torchair.scope.super_kernel("b", "c")
    assert dict(zip(switch.keys, switch.values, strict=True)) == {
        "_user_stream_label": "a",
        "_user_stream_priority": "0",
    }
    assert torchair.scope.npu_stream_switch("a", 2).values == ["a", "2"]
    assert dict(zip(kernel.keys, kernel.values, strict=True)) == {
        "_super_kernel_scope": "b",
        "_super_kernel_options": "c",
    }


def test_a_phase_counts_the_growth_of_every_kind():
    meters.reset_phases()
    with meters.phase("twice"):
        torch.ones(4, device="npu").cpu()
    with meters.phase("twice"), meters.phase("inner"):
        kept = torch.ones(1 << 10, device="npu:1") * 2
    found = meters.snapshot()["phases"]
    meters.reset_phases()
    assert (found["twice"]["entered"], found["inner"]["entered"]) == (2, 1)
    assert found["twice"]["copies"]["device_to_host"] == {"count": 1, "bytes": 16}
    assert found["inner"]["copies"]["device_to_host"] == {"count": 0, "bytes": 0}
    assert found["inner"]["operators"]["aten::mul.Tensor"]["calls"] == 1
    assert found["twice"]["graphs"] == dict.fromkeys(("captured", "replayed", "tasks"), 0)
    assert found["inner"]["allocated_bytes"]["1"] == torch.npu.memory_allocated(1) >= kept.nbytes
    assert found["twice"]["peak_bytes"]["1"] == found["inner"]["peak_bytes"]["1"] >= 2 * kept.nbytes
    assert meters.snapshot()["phases"] == {}


def test_the_package_says_what_it_stands_for():
    assert torch_npu.__version__ == "2.5.1.post1" and torch.version.cann == "8.2.RC1"
    assert torch.qint8 in torch_npu.unsupported_dtype and not hasattr(_C, "no_such_name")
    with pytest.raises(AttributeError, match="module 'torch_npu' has no attribute 'no_such_name'"):
        torch_npu.__getattr__("no_such_name")
    with pytest.raises(NotImplementedError, match="torch_npu.npu_no_such_operator is not emulated"):
        torch_npu.npu_no_such_operator()
