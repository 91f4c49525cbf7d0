"""Captured graphs: the work of a replay, calls that a capture rejects, and the owner of the memory."""

import gc
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
import torch_npu
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_emulator import meters
from tests.npu_emulator.device_process import DeviceProcess

MEBIBYTE = 1 << 20
# torch_npu asks CANN for 20 MiB where a tensor has 1 to 10 MiB.
SEGMENT = 20 * MEBIBYTE


def captured(work, **options):
    """Capture a graph of `work`; returns the graph and the result of `work`."""
    graph = torch.npu.NPUGraph()
    # A capture collects garbage first, which takes long.
    with patch("gc.collect"), torch.npu.graph(graph, **options):
        made = work()
    return graph, made


def on_die(*shape) -> torch.Tensor:
    return torch.randn(*shape).npu()


def test_a_replay_computes_from_the_inputs_of_now_into_the_results_of_then():
    given, weight = on_die(4, 8), on_die(8, 3)
    graph, product = captured(lambda: torch.relu(given @ weight) * 2)
    address = product.data_ptr()
    for _ in range(3):
        given.copy_(torch.randn(4, 8))
        graph.replay()
        assert torch.equal(product.cpu(), torch.relu(given.cpu() @ weight.cpu()) * 2)
        assert product.data_ptr() == address


@pytest.fixture
def process() -> Iterator[DeviceProcess]:
    """A process for a capture after which torch_npu can capture no more."""
    with DeviceProcess(TASK_QUEUE_ENABLE="0") as process:
        yield process


def test_a_capture_computes_nothing():
    total, given = torch.zeros(3, device="npu"), torch.ones(3, device="npu")

    def work():
        total.add_(given)
        total[1:] = total[:2].clone()
        return total * 2, total.argmax()

    graph, (doubled, _) = captured(work)
    assert total.tolist() == [0, 0, 0]
    graph.replay()
    assert total.tolist() == [1, 1, 1] and doubled.tolist() == [2, 2, 2]
    graph.replay()
    assert total.tolist() == [2, 2, 2]


def test_views_and_out_arguments():
    given, out = on_die(4, 6), torch.empty(0, device="npu")

    def work():
        torch.mm(given.t()[1:], given[:, 2:], out=out)
        flipped = out.unsqueeze(0).transpose_(1, 2)
        flipped[0, 0].zero_()
        return flipped.reshape(-1)[::2]

    graph, made = captured(work)
    given.copy_(torch.randn(4, 6))
    graph.replay()
    expected = given.cpu().t()[1:] @ given.cpu()[:, 2:]
    expected.t()[0] = 0
    assert torch.equal(out.cpu(), expected) and torch.equal(made.cpu(), expected.t().reshape(-1)[::2])


def test_operators_of_torch_npu_are_recorded_with_what_they_write():
    cache, values, slots = torch.zeros(2, 4, 1, 2, device="npu"), on_die(3, 1, 2), torch.tensor([0, 5, 7]).int().npu()
    other = torch.zeros_like(cache)
    weight = on_die(2)

    def work():
        normed, _ = torch_npu.npu_rms_norm(values, weight)
        torch_npu._npu_reshape_and_cache(normed, values, cache, other, slots)

    graph, _ = captured(work)
    assert not cache.any() and not other.any()
    values.copy_(torch.randn(3, 1, 2))
    slots.copy_(torch.tensor([1, 2, 6]))
    graph.replay()
    assert torch.equal(other.cpu().view(8, 2)[[1, 2, 6]], values.cpu().view(3, 2))
    normed, _ = torch_npu.npu_rms_norm(values, weight)
    assert torch.equal(cache.view(8, 2)[[1, 2, 6]], normed.view(3, 2)) and cache.count_nonzero() == 6


def test_numbers_of_the_host_are_part_of_the_graph():
    given, factor, lengths = on_die(2), torch.tensor(3.0), [2]
    graph, made = captured(lambda: given * factor + lengths[0])
    factor.fill_(7)
    lengths[0] = 5
    graph.replay()
    assert torch.equal(made.cpu(), given.cpu() * 3 + 2)


def test_gradients_are_captured_with_their_forward():
    weight, given = on_die(4, 4).requires_grad_(), on_die(2, 4)
    gain = on_die(4).requires_grad_()

    def step():
        normed, _ = torch_npu.npu_rms_norm(given @ weight, gain)
        normed.square().sum().backward()

    step()
    weight.grad = gain.grad = None
    graph, _ = captured(step)
    given.copy_(torch.randn(2, 4))
    graph.replay()
    found = [weight.grad.clone(), gain.grad.clone()]
    weight.grad = gain.grad = None
    step()
    for gradient, of in zip(found, (weight, gain), strict=True):
        torch.testing.assert_close(gradient, of.grad)


def test_a_training_step_with_optimizer_is_the_eager_one():
    layers = torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3)
    net, given, labels = torch.nn.Sequential(*layers).npu(), on_die(5, 8), torch.tensor([0, 1, 2, 1, 0]).npu()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = torch.nn.functional.cross_entropy(net(given), labels)
        loss.backward()
        optimizer.step()
        return loss

    step()
    kept = [*net.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())]
    before = [tensor.detach().clone() for tensor in kept]
    graph, loss = captured(step)
    losses, expected = [], []
    for _ in range(4):
        graph.replay()
        losses.append(loss.item())
    replayed = [tensor.detach().clone() for tensor in kept]
    with torch.no_grad():
        for tensor, value in zip(kept, before, strict=True):
            tensor.copy_(value)
    expected = [step().item() for _ in range(4)]
    assert losses == expected and len(set(losses)) == 4
    assert all(torch.equal(*pair) for pair in zip(replayed, kept, strict=True))


def test_a_dropout_keeps_the_mask_of_its_capture():
    """torch_npu draws the seed of a mask on the host, so it is part of the graph."""
    given = torch.ones(1000, device="npu")
    graph, dropped = captured(lambda: torch.nn.functional.dropout(given, 0.5))
    graph.replay()
    first = dropped.clone()
    graph.replay()
    assert torch.equal(first, dropped) and 0 < first.count_nonzero() < 1000
    assert not torch.equal(first, torch.nn.functional.dropout(given, 0.5)), "control: another mask"


def test_pinned_memory_is_read_and_written_at_every_replay():
    source, target, middle = torch.zeros(3).pin_memory(), torch.zeros(3).pin_memory(), torch.zeros(3, device="npu")

    def work():
        middle.copy_(source, non_blocking=True)
        target.copy_(middle + 1, non_blocking=True)

    graph, _ = captured(work)
    source.fill_(4)
    assert not target.any() and not middle.any()
    graph.replay()
    torch.npu.synchronize()
    assert target.tolist() == [5, 5, 5] and middle.tolist() == [4, 4, 4]


CAPTURED_STREAM, CAPTURED_EVENT, NOT_IN_THIS_MODE = (f"error code:? ?(is )?{code}" for code in (107027, 107028, 107030))


def wait_for_event() -> None:
    event = torch.npu.Event()
    event.record()
    event.synchronize()


REFUSED: dict[str, tuple[str, Callable[[torch.Tensor], object]]] = {
    "item": (CAPTURED_STREAM, lambda given: given.sum().item()),
    "copy to the host": (f"{CAPTURED_STREAM}|{NOT_IN_THIS_MODE}", lambda given: given.cpu()),
    "copy to the die": (f"{CAPTURED_STREAM}|{NOT_IN_THIS_MODE}", lambda given: given.copy_(torch.ones(4))),
    "copy that does not wait": ("not pinned", lambda given: given.copy_(torch.ones(4), non_blocking=True)),
    "synchronize": (CAPTURED_STREAM, lambda given: torch.npu.synchronize()),
    "wait for the stream": (CAPTURED_STREAM, lambda given: torch.npu.current_stream().synchronize()),
    "wait for an event": (CAPTURED_EVENT, lambda given: wait_for_event()),
    "query of an event": (CAPTURED_EVENT, lambda given: torch.npu.current_stream().record_event().query()),
    "nonzero": (CAPTURED_STREAM, lambda given: given.nonzero()),
    "mask": (CAPTURED_STREAM, lambda given: given[given > 0]),
    "index of the host": (f"{CAPTURED_STREAM}|{NOT_IN_THIS_MODE}", lambda given: given[torch.tensor([0, 1])]),
    "random numbers": ("Not support Generator while in capture mode", lambda given: torch.rand(2, device="npu")),
    "replay of another graph": (CAPTURED_STREAM, lambda given: captured_before().replay()),
}


def captured_before() -> torch.npu.NPUGraph:
    return REPLAYABLE[0]


REPLAYABLE: list[torch.npu.NPUGraph] = []


def refuse(state: dict, what: str) -> None:
    """The graph keeps the work captured before the rejection, as on a device: CANN does not invalidate it."""
    words, refused = REFUSED[what]
    given = on_die(4)
    REPLAYABLE[:] = [captured(lambda: given + 1)[0]]
    before, graph = given.clone(), torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match=words), torch.npu.graph(graph):
        given.add_(1)
        refused(given)
    assert torch.equal(given, before), "what was captured is not done"
    assert not torch.npu.is_current_stream_capturing()
    graph.replay()
    assert torch.equal(given, before + 1)
    refused(given)  # outside a capture it is fine
    torch.npu.synchronize()


@pytest.mark.parametrize("what", REFUSED)
def test_a_capture_may_not_wait_for_the_die(process, what):
    process(refuse, what)


def capture_within_another(state: dict) -> None:
    given, outer = on_die(2), torch.npu.NPUGraph()
    with torch.npu.graph(outer):
        doubled = given * 2
        with pytest.raises(RuntimeError, match="error code is 107027"):
            torch.npu.NPUGraph().capture_begin()
    outer.replay()
    assert torch.equal(doubled, given * 2)


def test_captures_cannot_be_nested(process):
    process(capture_within_another)


def test_graphs_hold_one_capture():
    given, graph = on_die(2), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        doubled = given * 2
    with pytest.raises(RuntimeError, match="already owns"):
        graph.capture_begin()
    graph.reset()
    with torch.npu.graph(graph):
        tripled = given * 3
    graph.replay()
    assert torch.equal(tripled, given * 3) and doubled.is_npu


def begin_wrongly(state: dict) -> None:
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="non-default stream"):
        graph.capture_begin()
    with pytest.raises(RuntimeError, match="Unknown capture error mode"):
        graph.capture_begin(capture_error_mode="lenient")
    for use in (graph.replay, graph.pool):
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            use()
    with pytest.raises(RuntimeError, match="error code is 107029"):
        graph.capture_end()


def test_what_torch_npu_rejects_of_a_graph_that_is_not_captured(process):
    process(begin_wrongly)


def test_an_empty_graph_does_nothing():
    graph, _ = captured(lambda: None)
    with meters.phase("empty"):
        graph.replay()
    assert meters.snapshot()["phases"]["empty"]["graphs"] == {"captured": 0, "replayed": 1, "tasks": 0}


def test_program_error_keeps_captured_points():
    given, graph = on_die(2), torch.npu.NPUGraph()
    with pytest.raises(KeyError), torch.npu.graph(graph):
        doubled = given * 2
        raise KeyError
    graph.replay()
    assert torch.equal(doubled, given * 2)


def test_only_streams_that_wait_for_the_captured_one_are_recorded():
    given, total, side, other = on_die(2), torch.zeros(2, device="npu"), torch.npu.Stream(), torch.npu.Stream()

    def work():
        doubled = given * 2
        with torch.npu.stream(other):
            assert not torch.npu.is_current_stream_capturing()
            total.add_(1)
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            doubled.add_(1)
        event = side.record_event()
        torch.npu.current_stream().wait_event(event)
        return doubled

    graph, made = captured(work)
    assert total.tolist() == [1, 1], "done at once, not recorded"
    graph.replay()
    assert total.tolist() == [1, 1] and torch.equal(made, given * 2 + 1)


def capture_without_joining(state: dict) -> None:
    side, graph = torch.npu.Stream(), torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="error code is 107025.*\n.*\na capture ended before its stream waited"):
        with torch.npu.graph(graph):
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                torch.ones(2, device="npu")
    with pytest.raises(RuntimeError, match="without a preceding"):
        graph.replay()


def test_a_stream_that_is_not_waited_for_makes_the_capture_invalid(process):
    process(capture_without_joining)


def test_the_graph_keeps_memory_on_the_die_until_it_is_gone():
    gc.collect()
    given = torch.ones(2 * MEBIBYTE, dtype=torch.uint8, device="npu")
    torch.npu.empty_cache()
    allocated, reserved = torch.npu.memory_allocated(), torch.npu.memory_reserved()
    graph, made = captured(lambda: (given + 1) * 2)
    assert torch.npu.memory_allocated() == allocated + 2 * MEBIBYTE + 512
    del made
    torch.npu.empty_cache()
    assert torch.npu.memory_allocated() == allocated
    held = torch.npu.memory_reserved()
    assert held == reserved + SEGMENT
    graph.replay()
    assert torch.npu.memory_reserved() == held, "a replay takes no memory"
    graph.reset()
    torch.npu.empty_cache()
    assert (torch.npu.memory_allocated(), torch.npu.memory_reserved()) == (allocated, reserved)


def test_results_outlive_their_graph():
    given = on_die(5)
    graph, made = captured(lambda: given * 2)
    graph.replay()
    del graph
    gc.collect()
    assert torch.equal(made, given * 2)


def test_graphs_of_one_pool_use_each_others_memory():
    """A graph's results are lost when another is replayed; a graph with a pool of its own keeps them."""
    pool, given = torch.npu.graph_pool_handle(), on_die(1000)
    first, made = captured(lambda: given + 1, pool=pool)
    address = made.data_ptr()
    del made
    second, again = captured(lambda: given + 2, pool=pool)
    third, apart = captured(lambda: given + 3)
    assert first.pool() == second.pool() == pool != third.pool()
    assert again.data_ptr() == address != apart.data_ptr()
    second.replay()
    first.replay()
    assert torch.equal(again, given + 1), "overwritten by the graph that had the memory first"
    fourth, shared = captured(lambda: given + 4, pool=third.pool())
    fourth.replay()
    assert torch.equal(shared, given + 4)


def test_weak_references_leave_memory_to_the_pool():
    """vllm-ascend holds its graphs' results this way: the next graph may use the memory, which stays readable."""
    from vllm_ascend import vllm_ascend_C  # noqa: F401

    pool, given = torch.npu.graph_pool_handle(), on_die(1000)
    first, made = captured(lambda: given + 1, pool=pool)
    weak = torch.ops._C.weak_ref_tensor(made)
    assert weak.data_ptr() == made.data_ptr() and weak.shape == made.shape
    del made
    second, again = captured(lambda: given + 2, pool=pool)
    assert again.data_ptr() == weak.data_ptr()
    second.replay()
    assert torch.equal(weak, given + 2)
    first.replay()
    assert torch.equal(weak, given + 1)


def run_out_of_memory(state: dict) -> None:
    graph = torch.npu.NPUGraph()
    torch.npu.set_per_process_memory_fraction(2.5 * SEGMENT / torch.npu.mem_get_info()[1])
    with pytest.raises(RuntimeError, match="NPU out of memory"), torch.npu.graph(graph):
        kept = [torch.empty(SEGMENT - 512, dtype=torch.uint8, device="npu") for _ in range(3)]
    assert not torch.npu.is_current_stream_capturing()
    graph.reset()
    gc.collect()
    torch.npu.empty_cache()
    kept = torch.empty(2 * SEGMENT - 512, dtype=torch.uint8, device="npu")
    assert kept.is_npu


def test_a_capture_runs_out_of_memory_like_anything_else(process):
    process(run_out_of_memory)


def test_a_hundred_graphs_leave_nothing():
    given = on_die(64)
    captured(lambda: given + 1)
    gc.collect()
    torch.npu.empty_cache()
    before = torch.npu.memory_reserved()
    for _ in range(100):
        graph, made = captured(lambda: (given + 1).exp())
        graph.replay()
    del graph, made
    gc.collect()
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() == before


def test_meters_count_captures_and_replays():
    given = on_die(3)
    torch.npu.synchronize()
    with meters.phase("graphs"):
        graph, _ = captured(lambda: (given * given).exp())
        for _ in range(5):
            graph.replay()
        torch.npu.synchronize()
    found = meters.snapshot()["phases"]["graphs"]
    assert found["graphs"] == {"captured": 1, "replayed": 5, "tasks": 10}
    assert found["operators"] == {name: {"calls": 5} for name in ("aclnnExp", "aclnnMul")}


UNARY = (torch.exp, torch.tanh, torch.neg, torch.square, lambda x: x.softmax(-1), lambda x: x.t(), lambda x: x.flip(0))
BINARY = (torch.add, torch.mul, torch.sub, torch.maximum, lambda x, y: x @ y, lambda x, y: torch.cat((x, y))[:4])
IN_PLACE = (
    lambda x, y: x.add_(y),
    lambda x, y: x[1:].mul_(0.5),
    lambda x, y: x.t().copy_(y),
    lambda x, y: x.clamp_(-1, 1),
    lambda x, y: x.index_copy_(0, torch.arange(2, device=x.device), y[:2]),
    lambda x, y: x.masked_fill_(y > 0, 0.25),
)
STEPS = st.lists(
    st.tuples(st.sampled_from((*UNARY, *BINARY, *IN_PLACE)), st.integers(0, 20), st.integers(0, 20)),
    min_size=1, max_size=12,
)  # fmt: skip


def chain(steps, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Do the steps, each on two of the tensors that there are by then; a step that makes one adds it."""
    for step, first, second in steps:
        x, y = tensors[first % len(tensors)], tensors[second % len(tensors)]
        if step in UNARY:
            tensors.append(step(x))
        elif step in BINARY:
            tensors.append(step(x, y))
        else:
            step(x, y.clone())
    return tensors


@settings(max_examples=60)
@given(STEPS, st.integers(0, 1000))
def test_random_chains_replayed_equal_the_host(steps, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.zeros(4, 4, device="npu") for _ in range(2)]
    graph, made = captured(lambda: chain(steps, list(inputs)))
    for _ in range(2):
        fresh = [torch.randn(4, 4, generator=generator) for _ in inputs]
        for tensor, values in zip(inputs, fresh, strict=True):
            tensor.copy_(values)
        graph.replay()
        for found, expected in zip(made, chain(steps, fresh), strict=True):
            torch.testing.assert_close(found.cpu(), expected, equal_nan=True)
