"""Devices, streams, events, generators, pinned memory, autocast and storages behave as on any torch device."""

import copy
import io
import pickle
import subprocess
import sys

import acl
import pytest
import torch
import torch_npu

from npu_emulator import counters


def test_the_device_is_called_npu():
    tensor = torch.ones(2, device="npu")
    assert str(tensor.device) == "npu:0" and tensor.is_npu and not torch.ones(2).is_npu
    assert tensor.type() == "torch.npu.FloatTensor"
    assert torch.npu.is_available() and torch.npu.device_count() == counters.device_count()


@pytest.mark.parametrize(
    ("devices", "visible", "count"),
    [
        ("4", None, 4),
        ("4", "2", 1),
        ("4", "0,3", 2),
        ("4", "0,4,1", 1),
        ("4", "", 0),
        ("16", "8,9,10", 3),
        ("", None, 8),
    ],
)
def test_visible_dies_are_counted(monkeypatch, devices, visible, count):
    monkeypatch.setenv("NPU_EMULATOR_DEVICES", devices)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    assert acl.rt.get_device_count() == (count, 0)


# Values of torch_npu's own test, which checks that it counts the listed dies as CANN does.
LISTS = ("", ",", " ,", ", ", "0,", ",0", "0, ", "0, 1", "0 ,1", "0,1", "0,32,1", "0,32,0", "0,0", "0,1,1", "npu0",
         "1,0")  # fmt: skip


def test_torch_cann_and_acl_count_the_same_dies_of_every_list():
    program = f"""
import os, torch, torch_npu, acl
for visible in {LISTS}:
    if os.fork() == 0:
        os.environ["ASCEND_RT_VISIBLE_DEVICES"] = visible
        print(torch.npu.device_count(), torch_npu._C._npu_getDeviceCount(), acl.rt.get_device_count()[0], flush=True)
        os._exit(0)
    os.wait()
"""
    environment = {"NPU_EMULATOR_DEVICES": "4", "PATH": "/usr/bin"}
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    counted = [line.split() for line in printed.stdout.splitlines()]
    assert all(len(set(each)) == 1 for each in counted)
    assert "".join(each[0] for each in counted) == "0000101112110000"


def test_a_process_forked_before_use_has_the_dies_that_it_was_given_since():
    """Ray sets the variable in a worker that was forked from a template process after all imports."""
    program = """
import os, torch
child = os.fork()
if child == 0:
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "3"
    os._exit(torch.npu.device_count())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.npu.device_count())
"""
    environment = {"NPU_EMULATOR_DEVICES": "4", "PATH": "/usr/bin"}
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert printed.stdout.split() == ["1", "4"]


def test_the_current_device_receives_new_tensors():
    with torch.npu.device(1):
        assert torch.npu.current_device() == 1
        assert torch.ones(1, device="npu").device.index == 1
        assert torch.empty(1, device=0).device.index == 0
    assert torch.npu.current_device() == 0


def test_an_invisible_die_rejected():
    with pytest.raises(RuntimeError, match="error code is 107001.*\n.*\n.*Invalid device ID"):
        torch.empty(1, device="npu:63")
    with pytest.raises(RuntimeError, match="device 63 is not one of the 8 that this process sees"):
        torch.npu.set_device(63)


def test_tensors_of_host_and_device_do_not_mix():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device. Expected NPU tensor"):
        torch.ones(3, device="npu") + torch.ones(3)
    assert (torch.ones(3, device="npu") + torch.tensor(1.0)).device.type == "npu"


def test_generators_repeat_and_differ_by_device():
    torch.npu.manual_seed_all(7)
    first = torch.rand(5, device="npu:0").cpu()
    assert torch.equal(first, torch.rand(5, device="npu:1").cpu())
    state = torch.npu.get_rng_state()
    drawn = torch.rand(5, device="npu:0").cpu()
    assert not torch.equal(first, drawn)
    torch.npu.set_rng_state(state)
    assert torch.equal(drawn, torch.rand(5, device="npu:0").cpu())
    own = torch.Generator(device="npu").manual_seed(7)
    assert own.device.type == "npu" and torch.equal(first, torch.rand(5, generator=own, device="npu").cpu())


def test_host_generator_is_untouched_by_the_device():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    torch.rand(3, device="npu")
    assert torch.equal(expected, torch.rand(3))


def test_pinned_memory_is_remembered():
    pinned = torch.ones(4, pin_memory=True)
    assert pinned.is_pinned() and pinned[2:].is_pinned() and pinned.to("npu").sum() == 4
    ordinary = torch.ones(4)
    assert not ordinary.is_pinned() and ordinary.pin_memory().is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(1, device="npu").pin_memory()


def test_streams_and_events_keep_identity_and_time():
    stream = torch.npu.Stream()
    before = torch.npu.current_stream()
    with torch.npu.stream(stream):
        assert torch.npu.current_stream() == stream != before
    assert torch.npu.current_stream() == before == torch.npu.default_stream()
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0 and end.query()
    with pytest.raises(RuntimeError, match="must be recorded"):
        torch.npu.Event(enable_timing=True).elapsed_time(end)


def test_autocast_picks_the_lower_precision():
    matrix = torch.ones(2, 2, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert (matrix @ matrix).dtype == torch.bfloat16 and matrix.exp().dtype == torch.float32
        assert torch.npu.is_autocast_enabled() and torch.npu.get_autocast_dtype() == torch.bfloat16
    assert (matrix @ matrix).dtype == torch.float32


def test_autocast_of_the_host_casts_no_operator_of_the_device():
    """verl's FSDP actor in float32 computes under the host's autocast, which on an NPU changes nothing."""
    query = torch.randn(1, 2, 16, 32)
    on_device = query.npu()

    def operators() -> list[torch.Tensor]:
        fused = torch_npu.npu_fusion_attention(on_device, on_device, on_device, 2, "BNSD", scale=0.2)[0]
        return [
            fused.cpu(),
            (on_device @ on_device.mT).cpu(),
            torch.nn.functional.linear(on_device, on_device[0, 0]).cpu(),
        ]

    expected = operators()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (query @ query.mT).dtype == torch.bfloat16
        found = operators()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_save_load_and_pickle_keep_device_and_values():
    tensors = {"weight": torch.randn(3, 4, device="npu:1"), "count": torch.arange(3, device="npu")}
    file = io.BytesIO()
    torch.save(tensors, file)
    for location, expected in ((None, "npu:1"), ("cpu", "cpu"), ("npu:0", "npu:0")):
        file.seek(0)
        loaded = torch.load(file, map_location=location, weights_only=True)
        assert str(loaded["weight"].device) == expected
        assert torch.equal(loaded["weight"].cpu(), tensors["weight"].cpu())
    copied = pickle.loads(pickle.dumps(tensors["weight"]))
    assert copied.device.index == 1 and torch.equal(copied.cpu(), tensors["weight"].cpu())


def test_views_share_memory_and_storages_resize():
    base = torch.zeros(4, 4, device="npu")
    base[1:3, ::2] = 1
    assert base.sum() == 4 and base.view(16)[4] == 1 and base.t()._base is base
    storage = base.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    assert storage.nbytes() == 0 and storage.device.type == "npu"
    storage.resize_(size)
    base.fill_(2)
    assert base.sum() == 32


def test_parameters_move_between_devices_in_place():
    layer = torch.nn.Linear(2, 2)
    weight = layer.weight
    layer.to("npu")
    assert layer.weight is weight and weight.is_npu
    weight.data = torch.zeros(2, 2)
    assert weight.device.type == "cpu"


def test_legacy_tensor_types_know_their_own():
    assert isinstance(torch.ones(1, device="npu"), torch.npu.FloatTensor)
    assert not isinstance(torch.ones(1), torch.npu.FloatTensor)
    assert not isinstance(torch.ones(1, device="npu"), torch.npu.LongTensor)
    assert torch.npu.LongTensor([1, 2]).tolist() == [1, 2]


def test_an_operator_that_is_not_emulated_says_its_name_when_the_device_is_waited_for():
    program = """
import torch, torch_npu
boxes = torch.rand(4, 1, device="npu")
torch_npu.npu_ciou(boxes, boxes)
torch.npu.synchronize()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1 and "CIoU is not emulated" in ended.stderr, ended.stderr
    with pytest.raises(AttributeError):
        torch_npu.no_such_name  # noqa: B018


def test_a_forked_process_may_let_go_of_tensors_of_its_parent():
    """The parent's memory and values stay as they are."""
    program = """
import os, torch, torch_npu
x = torch.ones(8, device="npu")
torch.npu.synchronize()
child = os.fork()
if child == 0:
    del x
    os._exit(7)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert (x + 1).tolist() == [2] * 8 and torch.npu.memory_allocated() == 512
print(code)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout == "7\n", ended.stderr


@pytest.mark.parametrize("used", [True, False])
def test_a_fork_of_multiprocessing_after_use_rejected_and_before_use_is_fine(used):
    """torch_npu notices only forks by multiprocessing."""
    program = f"""
import multiprocessing, os, torch, torch_npu
def use():
    try:
        torch.ones(1, device="npu")
        os._exit(0)
    except RuntimeError as error:
        os._exit(7 if "forked subprocess" in str(error) and torch.npu._is_in_bad_fork() else 8)
if {used}:
    torch.ones(1, device="npu")
    torch.npu.synchronize()
child = multiprocessing.get_context("fork").Process(target=use)
child.start()
child.join()
os._exit(child.exitcode)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == (7 if used else 0)


@pytest.mark.parametrize(("visible", "count"), [(None, 6), ("1,4", 2), ("", 0)])
def test_ray_finds_the_dies(monkeypatch, visible, count):
    from ray._private.accelerators.npu import NPUAcceleratorManager

    monkeypatch.setenv("NPU_EMULATOR_DEVICES", "6")
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    assert NPUAcceleratorManager.get_current_node_num_accelerators() == count
    assert NPUAcceleratorManager.get_current_node_accelerator_type() == "Ascend910_9391"


def test_acl_knows_the_memory_of_the_current_device():
    """MindSpeed makes this call."""
    with torch.npu.device(1):
        held = torch.empty(3 << 20, dtype=torch.uint8, device="npu")
        free, total, code = acl.rt.get_mem_info(1)
        assert code == 0 and total - free >= held.nbytes and (free, total) == torch.npu.mem_get_info("npu:1")
    assert acl.rt.get_mem_info(1) == (*torch.npu.mem_get_info("npu:0"), 0)


def test_acl_copies_bytes_between_host_and_device():
    """vllm-ascend's allocator saves and restores memory this way; kinds 1 and 2 are host to device and back."""
    tensor, host = torch.arange(6, dtype=torch.int32, device="npu"), torch.zeros(6, dtype=torch.int32)
    torch.npu.synchronize()
    assert acl.rt.memcpy(host.data_ptr(), 24, tensor.data_ptr(), 24, 2) == 0
    assert host.tolist() == [0, 1, 2, 3, 4, 5]
    assert acl.rt.memcpy(tensor.data_ptr(), 24, (host * 2).data_ptr(), 24, 1) == 0
    assert tensor.tolist() == [0, 2, 4, 6, 8, 10]
    assert acl.rt.memcpy(host.data_ptr(), 4, tensor.data_ptr(), 24, 2) != 0 and host.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("scaler_of", [torch.amp.GradScaler, None])
def test_a_scaler_skips_steps_with_infinite_gradients(scaler_of):
    options = dict(init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=2)
    scaler = scaler_of("npu", **options) if scaler_of else torch.npu.amp.GradScaler(**options)
    weight = torch.nn.Parameter(torch.ones(3, device="npu"))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    infinite = float("inf")
    steps = ((2.0, 0.0, 8.0), (infinite, 0.0, 2.0), (2.0, -1.0, 2.0), (2.0, -2.0, 6.0), (infinite, -2.0, 1.5))
    for factor, expected, scale in steps:
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [expected] * 3 and scaler.get_scale() == scale


def test_storages_and_copies_keep_their_device():
    tensor = torch.arange(4.0, device="npu:1")
    storage = tensor.untyped_storage()
    assert str(storage.device) == str(storage.clone().device) == "npu:1" and storage.cpu().device.type == "cpu"
    copied = copy.deepcopy({"tensor": tensor, "view": tensor[1:]})
    assert copied["tensor"].device.index == 1 and copied["view"].tolist() == [1, 2, 3]
    copied["tensor"].fill_(5)
    assert copied["view"].tolist() == [5, 5, 5] and tensor.tolist() == [0, 1, 2, 3]
    file = io.BytesIO()
    torch.save({"storage": tensor.clone().untyped_storage(), "parameter": torch.nn.Parameter(tensor)}, file)
    file.seek(0)
    loaded = torch.load(file, map_location={"npu:1": "npu:2"}, weights_only=False)
    assert loaded["storage"].device.index == loaded["parameter"].device.index == 2
    assert isinstance(loaded["parameter"], torch.nn.Parameter) and loaded["parameter"].tolist() == [0, 1, 2, 3]


def test_a_scaler_that_is_given_nothing_is_torchs():
    """Only one option is torch_npu's own."""
    npus, torchs = torch.npu.amp.GradScaler(), torch.amp.GradScaler("npu")
    assert npus.state_dict() == torchs.state_dict() | {"dynamic": True} and npus.is_enabled() == torchs.is_enabled()
    assert not torch.npu.amp.GradScaler(enabled=False, dynamic=True).is_enabled()
