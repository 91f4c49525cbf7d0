"""Memory is charged to the die, runs out before a kernel computes, and is freed. Each test has a process and a die."""

import uuid
from collections.abc import Callable, Iterator

import pytest
import torch
import torch_npu

from tests.npu_emulator.device_process import DeviceProcess

MEBIBYTE = 1 << 20
CAPACITY = 256 * MEBIBYTE
DIE = "npu:0"
# torch_npu adds 32 bytes to a tensor and takes a multiple of 512; from CANN it takes 2 MiB for small tensors, 20 MiB
# for those of 1 to 10 MiB, and for larger ones their size.
SMALL, MIDDLE = 2 * MEBIBYTE, 20 * MEBIBYTE


CHECKS: dict[str, Callable[[], None]] = {}


@pytest.fixture
def process() -> Iterator[DeviceProcess]:
    node = f"test-{uuid.uuid4().hex}"
    environment = {"NPU_EMULATOR_CAPACITY_MB": str(CAPACITY // MEBIBYTE), "ASCEND_RT_VISIBLE_DEVICES": "0"}
    with DeviceProcess(NPU_EMULATOR_NODE=node, **environment) as process:
        yield process


def on_the_die(check: Callable[[], None]) -> Callable[[DeviceProcess], None]:
    """Make a test of a function that runs in a process of its own, which has not used its die yet."""

    def test(process: DeviceProcess) -> None:
        process(run, check.__name__)

    test.__doc__, CHECKS[check.__name__] = check.__doc__, check
    return test


def run(state: dict, name: str) -> None:
    CHECKS[name]()


def allocated() -> int:
    return torch.npu.memory_allocated(DIE)


def reserved() -> int:
    return torch.npu.memory_reserved(DIE)


def bytes_of(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=DIE)


def runs_out_of_memory(action: Callable[[], object]) -> bool:
    """Keep no traceback, which would keep tensors alive."""
    try:
        action()
    except RuntimeError as error:
        assert "NPU out of memory. Tried to allocate" in str(error)
        return True
    return False


@on_the_die
def test_allocations_are_rounded_and_returned():
    tensor = torch.empty(1, device=DIE)
    assert (allocated(), reserved()) == (512, SMALL)
    other = torch.empty(1000, device=DIE)
    assert (allocated(), reserved()) == (512 + 4096, SMALL)
    del tensor, other
    assert (allocated(), reserved()) == (0, SMALL)
    torch.npu.empty_cache()
    assert reserved() == 0
    assert torch.npu.max_memory_allocated(DIE) == 512 + 4096


@on_the_die
def test_reserved_memory_is_used_again():
    first = torch.empty(MEBIBYTE, device=DIE)
    del first
    second = torch.empty(MEBIBYTE // 2, device=DIE)
    assert reserved() == MIDDLE
    assert torch.npu.mem_get_info(DIE) == (CAPACITY - MIDDLE, CAPACITY) and second.is_npu


@on_the_die
def test_full_die_reports_requested_and_free_memory():
    held = bytes_of(200 * MEBIBYTE)
    with pytest.raises(RuntimeError, match=r"Tried to allocate 60.00 MiB \(NPU 0; 256.00 MiB total capacity; 20"):
        bytes_of(59 * MEBIBYTE)
    assert torch.npu.memory_stats(DIE)["num_ooms"] == 1
    assert bytes_of(50 * MEBIBYTE).numel() and held.numel()


@on_the_die
def test_an_operator_rejected_before_it_writes():
    matrix = torch.ones(12, MEBIBYTE // 4, 4, device=DIE)
    held = bytes_of(CAPACITY - reserved() - 20 * MEBIBYTE)
    before = allocated()
    assert runs_out_of_memory(lambda: matrix + 1)
    assert allocated() == before
    del held
    assert matrix.sum() == 12 * MEBIBYTE
    assert (matrix + 1).sum() == 2 * 12 * MEBIBYTE


@on_the_die
def test_views_and_in_place_operators_cost_nothing():
    tensor = torch.ones(1024, device=DIE)
    before = allocated()
    views = [tensor[1:], tensor.view(32, 32), tensor.t(), *tensor.split(100), tensor.unfold(0, 4, 2)]
    tensor.add_(1).mul_(2).clamp_(max=3)
    assert allocated() == before and len(views) == 15


@on_the_die
def test_results_are_charged_once():
    tensor = torch.randn(1000, device=DIE)
    before = allocated()
    values, indices = tensor.sort()
    torch.npu.synchronize()
    assert allocated() == before + 4096 + 8192
    del values, indices
    assert allocated() == before


@on_the_die
def test_host_tensors_are_not_charged():
    before = torch.npu.mem_get_info(DIE)
    host = torch.randn(1000, 1000)
    host = host @ host
    assert torch.npu.mem_get_info(DIE) == before and allocated() == 0
    assert torch.ones(4, device=DIE).cpu().device.type == "cpu"


def three_products() -> torch.Tensor:
    weight = torch.ones(4, MEBIBYTE, device=DIE, requires_grad=True)
    return ((weight * 2).exp() * weight).sum()


@on_the_die
def test_out_of_memory_in_backward_leaves_no_trace():
    loss = three_products()
    torch.npu.synchronize()
    held = bytes_of(CAPACITY - reserved() - 22 * MEBIBYTE)
    assert runs_out_of_memory(loss.backward)
    del held, loss
    # torch's thread for backward lets go of what has failed when it begins with something else.
    three_products().backward()
    torch.npu.synchronize()
    assert allocated() == 0


@on_the_die
def test_running_out_a_hundred_times_leaks_nothing():
    """It runs out in an operator of torch, in one of torch_npu, in its gradient and in a graph of several."""
    x = torch.randn(3, MEBIBYTE, device=DIE, requires_grad=True)
    actions = {
        "operator": lambda: x.detach().sort(),
        "operator of torch_npu": lambda: torch_npu.npu_swiglu(x.detach()),
        "gradient of torch_npu": lambda: torch_npu.npu_swiglu(x).sum().backward(),
        "graph": lambda: ((x * 2).exp() * x).softmax(-1).sum().backward(),
        "storage": lambda: torch.empty(512, device=DIE).untyped_storage().resize_(12 * MEBIBYTE),
    }
    for name, action in actions.items():
        x.grad = None
        torch.npu.empty_cache()
        before, taken = allocated(), reserved()
        torch.npu.reset_peak_memory_stats(DIE)
        action()
        x.grad = None
        needed = torch.npu.max_memory_allocated(DIE) - before
        torch.npu.empty_cache()
        held = bytes_of((CAPACITY - taken - needed * 7 // 10) // SMALL * SMALL - 512)  # so that it fails underway
        assert all(runs_out_of_memory(action) for _ in range(100)), name
        del held
        torch.npu.empty_cache()
        # torch's thread for backward lets go of what has failed when it begins with something else.
        assert not runs_out_of_memory(action), name
        x.grad = None
        assert allocated() == before, name


@on_the_die
def test_a_hundred_steps_leak_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(DIE)
    optimizer = torch.optim.AdamW(model.parameters())
    found = set()
    for _ in range(100):
        model(torch.randn(8, 16, device=DIE)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.npu.synchronize()
        found.add(allocated())
    assert len(found) == 1


@on_the_die
def test_a_leak_would_be_seen():
    kept, found = [], set()
    for _ in range(5):
        kept.append(torch.ones(1, device=DIE))
        torch.npu.synchronize()
        found.add(allocated())
    assert len(found) == 5


@on_the_die
def test_a_share_of_the_capacity_can_be_set():
    torch.npu.set_per_process_memory_fraction(0.5, 0)
    assert runs_out_of_memory(lambda: bytes_of(130 * MEBIBYTE))
    torch.npu.set_per_process_memory_fraction(1.0, 0)
    assert bytes_of(130 * MEBIBYTE).is_npu
