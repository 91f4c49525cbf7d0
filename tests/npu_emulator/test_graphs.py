"""Captured graphs: what a replay does, what a capture may not do, and whose memory it is."""

import gc
from unittest.mock import patch

import pytest
import torch
import torch_npu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_npu import profiler

from npu_emulator import _C, meters

MEBIBYTE = 1 << 20


def captured(work, **options):
    """A graph of what `work` does, and what it returned."""
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


def test_a_capture_computes_nothing():
    total, given = torch.zeros(3, device="npu"), torch.ones(3, device="npu")

    def work():
        total.add_(given)
        total[1:] = total[:2].clone()
        return total * 2, total.argmax()

    graph, (doubled, largest) = captured(work)
    assert total.tolist() == [0, 0, 0]
    assert doubled.isnan().all() and largest == 0
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


def test_a_training_step_with_dropout_and_optimizer_is_the_eager_one():
    layers = torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3)
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
    torch.npu.manual_seed(7)
    graph, loss = captured(step)
    losses, expected = [], []
    for _ in range(4):
        graph.replay()
        losses.append(loss.item())
    replayed = [tensor.detach().clone() for tensor in kept]
    with torch.no_grad():
        for tensor, value in zip(kept, before, strict=True):
            tensor.copy_(value)
    torch.npu.manual_seed(7)
    expected = [step().item() for _ in range(4)]
    assert losses == expected and len(set(losses)) == 4
    assert all(torch.equal(*pair) for pair in zip(replayed, kept, strict=True))


def test_convolutions_are_recorded():
    given, kernel, bias = on_die(1, 2, 5, 5), on_die(3, 2, 3, 3), on_die(3)
    graph, made = captured(lambda: torch.nn.functional.conv2d(given, kernel, bias, padding=1))
    given.copy_(torch.randn(1, 2, 5, 5))
    graph.replay()
    torch.testing.assert_close(made.cpu(), torch.nn.functional.conv2d(given.cpu(), kernel.cpu(), bias.cpu(), padding=1))


def test_random_numbers_go_on_from_replay_to_replay():
    torch.npu.manual_seed(5)
    expected = [torch.rand(4, device="npu").cpu() for _ in range(3)]
    torch.npu.manual_seed(5)
    graph, drawn = captured(lambda: torch.rand(4, device="npu"))
    for draw in expected:
        graph.replay()
        assert torch.equal(drawn.cpu(), draw)


def test_pinned_memory_is_read_and_written_at_every_replay():
    source, target, middle = torch.zeros(3).pin_memory(), torch.zeros(3).pin_memory(), torch.zeros(3, device="npu")

    def work():
        middle.copy_(source, non_blocking=True)
        target.copy_(middle + 1, non_blocking=True)

    graph, _ = captured(work)
    source.fill_(4)
    assert not target.any() and not middle.any()
    graph.replay()
    assert target.tolist() == [5, 5, 5] and middle.tolist() == [4, 4, 4]


REFUSED = {
    "Tensor.item": lambda given: given.sum().item(),
    "a copy to the host": lambda given: given.cpu(),
    "a copy to the die": lambda given: given.copy_(torch.ones(4)),
    "that is not pinned": lambda given: given.copy_(torch.ones(4), non_blocking=True),
    "torch.npu.synchronize": lambda given: torch.npu.synchronize(),
    "Stream.synchronize": lambda given: torch.npu.current_stream().synchronize(),
    "Event.synchronize": lambda given: torch.npu.Event().synchronize(),
    "aten::nonzero": lambda given: given.nonzero(),
    "aten::index": lambda given: given[given > 0],
    "aten::index ": lambda given: given[torch.tensor([0, 1])],
    "the die's own": lambda given: torch.rand(2, device="npu", generator=torch.Generator("npu")),
    "resize_": lambda given: given.resize_(100),
    "replay of another graph": lambda given: captured_before().replay(),
}


def captured_before() -> torch.npu.NPUGraph:
    return REPLAYABLE[0]


REPLAYABLE: list[torch.npu.NPUGraph] = []


@pytest.mark.parametrize("what", REFUSED)
def test_a_capture_may_not_wait_for_the_die(what):
    given = on_die(4)
    REPLAYABLE[:] = [captured(lambda: given + 1)[0]]
    before, graph = given.clone(), torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="invalid") as raised, torch.npu.graph(graph):
        given.add_(1)
        REFUSED[what](given)
    assert what.strip() in str(raised.value) and "not permitted" in str(raised.value.__context__)
    assert torch.equal(given, before), "what the capture wrote is undone"
    for use in (graph.replay, graph.pool):
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            use()
    assert not torch.npu.is_current_stream_capturing()
    REFUSED[what](given) if what != "the die's own" else None  # outside a capture it is fine
    REPLAYABLE.clear()


def test_captures_cannot_be_nested_and_graphs_hold_one():
    given, outer = on_die(2), torch.npu.NPUGraph()
    with torch.npu.graph(outer):
        doubled = given * 2
        with pytest.raises(RuntimeError, match="nested"):
            torch.npu.NPUGraph().capture_begin()
    outer.replay()
    assert torch.equal(doubled, given * 2)
    with pytest.raises(RuntimeError, match="already owns"), torch.npu.graph(outer):
        pass
    outer.reset()
    with torch.npu.graph(outer):
        tripled = given * 3
    outer.replay()
    assert torch.equal(tripled, given * 3)


def test_what_capture_begin_refuses():
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="non-default stream"):
        graph.capture_begin()
    with pytest.raises(RuntimeError, match="Unknown capture error mode"):
        graph.capture_begin(capture_error_mode="lenient")
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with pytest.raises(RuntimeError, match="not being captured"):
        _C.Graph().end_capture()


def test_an_empty_graph_warns_and_does_nothing():
    with pytest.warns(UserWarning, match="graph is empty"):
        graph, _ = captured(lambda: None)
    graph.replay()


def test_an_error_of_the_program_leaves_what_was_captured():
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
            assert torch.npu.is_current_stream_capturing()
            doubled.add_(1)
        event = side.record_event()
        torch.npu.current_stream().wait_event(event)
        return doubled

    graph, made = captured(work)
    assert total.tolist() == [1, 1], "done at once, not recorded"
    graph.replay()
    assert total.tolist() == [1, 1] and torch.equal(made, given * 2 + 1)


def test_a_stream_that_is_not_waited_for_makes_the_capture_invalid():
    side, graph = torch.npu.Stream(), torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="has not waited for all streams"), torch.npu.graph(graph):
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            torch.ones(2, device="npu")
    with pytest.raises(RuntimeError, match="without a preceding"):
        graph.replay()


def test_memory_that_the_graph_uses_but_does_not_own_has_to_stay():
    weight, rest = on_die(4, 4), [on_die(4)]
    graph, made = captured(lambda: weight @ rest[0])
    weight.data = on_die(4, 4)
    with pytest.raises(RuntimeError, match="freed or replaced since it was captured, first in aten::addmv"):
        graph.replay()
    weight.data = weight.data.clone()
    graph, made = captured(lambda: weight @ rest[0])
    graph.replay()
    assert torch.equal(made, weight @ rest[0])
    rest.clear()
    with pytest.raises(RuntimeError, match="freed or replaced"):
        graph.replay()


def test_the_graph_keeps_memory_on_the_die_until_it_is_gone():
    gc.collect()
    given = torch.ones(MEBIBYTE, dtype=torch.uint8, device="npu")
    torch.npu.empty_cache()
    allocated, reserved = torch.npu.memory_allocated(), torch.npu.memory_reserved()
    graph, made = captured(lambda: (given + 1) * 2)
    assert torch.npu.memory_allocated() == allocated + MEBIBYTE
    del made
    torch.npu.empty_cache()
    assert torch.npu.memory_allocated() == allocated
    held = torch.npu.memory_reserved()
    assert 2 * MEBIBYTE <= held - reserved < 2 * MEBIBYTE + 4096
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
    """So what one has left is lost when another is replayed; with a pool of its own it is kept."""
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
    """As vllm-ascend holds what its graphs make: the next graph may use the memory, which stays readable."""
    pool, given = torch.npu.graph_pool_handle(), on_die(1000)
    first, made = captured(lambda: given + 1, pool=pool)
    weak = _C.weak_alias(made)
    assert weak.data_ptr() == made.data_ptr() and weak.shape == made.shape
    del made
    second, again = captured(lambda: given + 2, pool=pool)
    assert again.data_ptr() == weak.data_ptr()
    first.replay()
    assert torch.equal(weak, given + 1)
    del first, second, again
    gc.collect()
    assert torch.equal(weak, given + 1)
    ordinary = _C.weak_alias(given + 3)
    assert torch.equal(ordinary, given + 3), "nothing else keeps memory outside graphs"


@pytest.mark.filterwarnings("ignore:The NPU graph is empty")
def test_a_capture_runs_out_of_memory_like_anything_else():
    torch.npu.empty_cache()
    capacity, graph = _C.memory_statistics(0)["capacity"], torch.npu.NPUGraph()
    _C.set_capacity(0, torch.npu.memory_allocated() + 2 * MEBIBYTE)
    try:
        with pytest.raises(torch.OutOfMemoryError), torch.npu.graph(graph):
            kept = [torch.empty(MEBIBYTE, dtype=torch.uint8, device="npu") for _ in range(3)]
        assert not torch.npu.is_current_stream_capturing()
        graph.reset()
        gc.collect()
        torch.npu.empty_cache()
        kept = torch.empty(2 * MEBIBYTE - 4096, dtype=torch.uint8, device="npu")
        del kept
    finally:
        _C.set_capacity(0, capacity)


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
    with meters.phase("graphs"):
        graph, _ = captured(lambda: (given @ given).exp())
        for _ in range(5):
            graph.replay()
    found = meters.snapshot()["phases"]["graphs"]
    assert found["graphs"] == {"captured": 1, "replayed": 5, "tasks": 10}
    assert found["operators"]["aten::dot"]["calls"] == 6


def test_a_profile_shows_what_replays_compute():
    given = on_die(3)
    graph, _ = captured(lambda: (given @ given).exp_())
    with profiler.profile() as recorded:
        graph.replay()
    assert [event.name for event in recorded.recording.on_device()] == ["aten::dot", "aten::exp_"]


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


@pytest.mark.filterwarnings("ignore:The NPU graph is empty")
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
