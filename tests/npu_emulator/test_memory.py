"""Memory is charged to the die, refused before a kernel computes, and given back."""

import os
import subprocess
import sys

import pytest
import torch
import torch_npu  # noqa: F401

from npu_emulator import _C

MEBIBYTE = 1 << 20


def runs_out_of_memory(action) -> bool:
    """Keeps no traceback, which would keep tensors alive."""
    try:
        action()
    except torch.OutOfMemoryError:
        return True
    return False


@pytest.fixture
def die():
    """A die of its own with 8 MiB, empty."""
    index = _C.device_count() - 1
    capacity = _C.memory_statistics(index)["capacity"]
    _C.set_capacity(index, 8 * MEBIBYTE)
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats(index)
    before = torch.npu.memory_allocated(index)
    yield torch.device("npu", index)
    _C.set_capacity(index, capacity)
    assert torch.npu.memory_allocated(index) == before


def test_allocations_are_rounded_and_returned(die):
    tensor = torch.empty(1, device=die)
    assert torch.npu.memory_allocated(die) == 512
    other = torch.empty(1000, device=die)
    assert torch.npu.memory_allocated(die) == 512 + 4096
    del tensor, other
    assert torch.npu.memory_allocated(die) == 0
    assert torch.npu.memory_reserved(die) == 512 + 4096
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved(die) == 0
    assert torch.npu.max_memory_allocated(die) == 512 + 4096


def test_statistics_have_the_names_of_torch(die):
    kept, freed = torch.empty(1000, device=die), torch.empty(1, device=die)
    del freed
    stats = torch.npu.memory_stats(die)
    assert stats["allocated_bytes.all.current"] == stats["active_bytes.all.current"] == 4096 >= kept.nbytes
    assert stats["allocated_bytes.all.peak"] == stats["reserved_bytes.all.current"] == 512 + 4096
    assert stats["allocation.all.current"] == stats["allocation.all.allocated"] - stats["allocation.all.freed"]


def test_reserved_memory_is_used_again(die):
    first = torch.empty(MEBIBYTE, device=die)
    del first
    second = torch.empty(MEBIBYTE // 2, device=die)
    assert torch.npu.memory_reserved(die) == 4 * MEBIBYTE
    free, total = torch.npu.mem_get_info(die)
    assert (free, total) == (4 * MEBIBYTE, 8 * MEBIBYTE) and second.is_npu


def test_a_full_die_raises_as_torch_does(die):
    held = torch.empty(6 * MEBIBYTE, dtype=torch.uint8, device=die)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"NPU out of memory. Tried to allocate 3.00 MiB \(NPU \d+; 8.00 MiB"
    ):
        torch.empty(3 * MEBIBYTE, dtype=torch.uint8, device=die)
    assert torch.npu.memory_stats(die)["num_ooms"] >= 1
    assert torch.empty(2 * MEBIBYTE, dtype=torch.uint8, device=die).numel() and held.numel()


def test_an_operator_is_refused_before_it_writes(die):
    matrix = torch.ones(768, 1024, device=die)
    held = torch.empty(3 * MEBIBYTE, dtype=torch.uint8, device=die)
    assert runs_out_of_memory(lambda: matrix + 1)
    assert torch.npu.memory_allocated(die) == 6 * MEBIBYTE and matrix.sum() == 768 * 1024
    del held
    assert (matrix + 1).sum() == 2 * 768 * 1024


def test_workspaces_count_towards_the_peak(die):
    """A sort needs its indices and a copy: more than its input, which a charge for results alone would miss."""
    values = torch.randn(64 * 1024, device=die)
    torch.npu.reset_peak_memory_stats(die)
    before = torch.npu.memory_allocated(die)
    values.sort()
    assert torch.npu.max_memory_allocated(die) >= before + values.nbytes + 8 * values.numel()
    assert torch.npu.memory_allocated(die) == before


def test_views_and_in_place_operators_cost_nothing(die):
    tensor = torch.ones(1024, device=die)
    before = torch.npu.memory_allocated(die)
    views = [tensor[1:], tensor.view(32, 32), tensor.t(), *tensor.split(100), tensor.unfold(0, 4, 2)]
    tensor.add_(1).mul_(2).clamp_(max=3)
    assert torch.npu.memory_allocated(die) == before and len(views) == 15


def test_results_that_share_memory_are_charged_once(die):
    tensor = torch.randn(1000, device=die)
    before = torch.npu.memory_allocated(die)
    values, indices = tensor.sort()
    assert torch.npu.memory_allocated(die) == before + 4096 + 8192
    del values, indices


def test_host_tensors_are_not_charged(die):
    before = torch.npu.memory_allocated(die)
    host = torch.randn(1000, 1000)
    host = host @ host
    assert torch.npu.memory_allocated(die) == before
    assert torch.ones(4, device=die).cpu().device.type == "cpu"


def test_out_of_memory_in_backward_leaves_no_trace(die):
    def step():
        weight = torch.ones(256, 1024, device=die, requires_grad=True)
        return ((weight * 2).exp() * weight).sum()

    loss = step()
    held = torch.empty(8 * MEBIBYTE - torch.npu.memory_allocated(die) - MEBIBYTE, dtype=torch.uint8, device=die)
    assert runs_out_of_memory(loss.backward)
    del held, loss
    assert torch.npu.memory_allocated(die) == 0
    step().backward()


def test_running_out_a_hundred_times_leaks_nothing(die):
    """In an operator of torch, in one of torch_npu, in its gradient and in a graph of several."""
    x = torch.randn(64, 1024, device=die, requires_grad=True)
    actions = {
        "operator": lambda: x.detach().sort(),
        "operator of torch_npu": lambda: torch_npu.npu_swiglu(x.detach()),
        "gradient of torch_npu": lambda: torch_npu.npu_swiglu(x).sum().backward(),
        "graph": lambda: ((x * 2).exp() * x).softmax(-1).sum().backward(),
        "storage": lambda: torch.empty(512, device=die).untyped_storage().resize_(2 * MEBIBYTE),
    }
    for name, action in actions.items():
        x.grad = None
        before = torch.npu.memory_allocated(die)
        torch.npu.reset_peak_memory_stats(die)
        action()
        x.grad = None
        needed = torch.npu.max_memory_allocated(die) - before
        room = needed * 7 // 10  # so that it fails underway
        held = torch.empty(8 * MEBIBYTE - before - room, dtype=torch.uint8, device=die)
        assert all(runs_out_of_memory(action) for _ in range(100)), name
        del held
        # torch's thread for backward lets go of what has failed when it begins with something else.
        assert not runs_out_of_memory(action), name
        x.grad = None
        assert torch.npu.memory_allocated(die) == before, name


def test_a_hundred_steps_leak_nothing(die):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(die)
    optimizer = torch.optim.AdamW(model.parameters())
    allocated = set()
    for _ in range(100):
        model(torch.randn(8, 16, device=die)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        allocated.add(torch.npu.memory_allocated(die))
    assert len(allocated) == 1


def test_a_leak_would_be_seen(die):
    kept, allocated = [], set()
    for _ in range(5):
        kept.append(torch.ones(1, device=die))
        allocated.add(torch.npu.memory_allocated(die))
    assert len(allocated) == 5


def test_a_fraction_of_the_capacity_can_be_set(die):
    torch.npu.set_per_process_memory_fraction(0.5, die)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(5 * MEBIBYTE, dtype=torch.uint8, device=die)
    with pytest.raises(ValueError, match="Allowed range"):
        torch.npu.set_per_process_memory_fraction(1.5, die)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:128, garbage_collection_threshold:0.6",
        "expandable_segments:False,max_split_size_mb:21",
        "page_size:1g,base_addr_aligned_kb:0",
    ],
)
def test_options_of_the_allocator_are_taken(options):
    _C.check_allocator_options(options)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ("expandable_segment:True", "Unrecognized CachingAllocator option: expandable_segment"),
        ("expandable_segments:yes", "single True/False"),
        ("expandable_segments", "must be NAME:VALUE"),
        ("max_split_size_mb:20", "too small"),
        ("max_split_size_mb:large", "must be a number"),
        ("garbage_collection_threshold:1.5", "between 0 and 1"),
        ("expandable_segments:True,max_split_size_mb:128", "cannot be set with expandable_segments"),
    ],
)
def test_options_that_the_allocator_does_not_take_are_refused(options, refusal):
    with pytest.raises(RuntimeError, match=refusal):
        _C.check_allocator_options(options)


@pytest.mark.parametrize(("options", "code"), [("expandable_segments:True", 0), ("expandable:True", 1)])
def test_options_are_read_with_the_first_memory(options, code):
    program = "import torch; torch.ones(1, device='npu')"
    environment = os.environ | {"PYTORCH_NPU_ALLOC_CONF": options}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.returncode == code and ("Unrecognized" in ended.stderr) == bool(code)
