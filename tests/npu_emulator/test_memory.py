"""Memory is charged to the die, refused before a kernel computes, and given back."""

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
