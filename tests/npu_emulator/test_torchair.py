"""The wheel's torchair without a graph engine: Dynamo captures, every node is converted, and runs in its order.

A node that the graph engine would not take is rejected: test_engine checks that.
"""

from pathlib import Path

import pytest
import torch
import torch_npu
import torchair
from torch._dynamo.utils import counters

from npu_emulator import meters

on = {"device": "npu"}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()


def compiled(function, **options):
    return torch.compile(function, backend=torchair.get_npu_backend(), fullgraph=True, **options)


def block(x, gamma, weight):
    normed, _, total = torch_npu.npu_add_rms_norm(x, x, gamma)
    return torch_npu.npu_swiglu(normed @ weight) + total


def calls(snapshot: dict) -> dict:
    found = snapshot["phases"]["graph"]["operators"]
    return {name: numbers["calls"] for name, numbers in found.items() if name in ("aclnnAddRmsNorm", "aclnnSwiGlu")}


def test_a_graph_is_captured_once_and_runs_the_same_operators():
    inputs = [torch.randn(4, 8, **on), torch.randn(8, **on), torch.randn(8, 16, **on)]
    run = compiled(block, dynamic=True)
    with meters.phase("graph"):
        first = run(*inputs)
        second = run(inputs[0][:3], *inputs[1:])
        torch.npu.synchronize()
    assert torch.equal(first, block(*inputs)) and torch.equal(second, block(inputs[0][:3], *inputs[1:]))
    assert counters["stats"]["unique_graphs"] == 1
    assert calls(meters.snapshot()) == {"aclnnAddRmsNorm": 2, "aclnnSwiGlu": 2}


def test_uncapturable_work_is_an_error():
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(lambda x: x[: int(x.sum().item())])(torch.ones(3, **on))


def test_operators_are_given_tensors_in_order(monkeypatch):
    """GE's tensors have no strides, so it does the same; without a graph, the control, the view itself arrives."""
    overload, arrived = torch.ops.npu.npu_swiglu.default, []
    upstream = overload._op

    def seen(x, *rest):
        if type(x) is torch.Tensor:  # and none of those that Dynamo traces with
            arrived.append(x.is_contiguous())
        return upstream(x, *rest)

    monkeypatch.setattr(overload, "_op", seen)
    x = torch.randn(8, 4, **on)

    def of_a_view(x):
        return torch.ops.npu.npu_swiglu.default(x.t(), -1)

    assert torch.equal(compiled(of_a_view)(x), of_a_view(x))
    assert arrived == [True, False]


def test_caches_are_written_in_place():
    kv, gamma, angles = torch.randn(3, 1, 1, 48, **on), torch.randn(32, **on), torch.randn(3, 1, 1, 16, **on)
    slots = torch.tensor([5, 2, -1], **on)

    def step(kv, rope, latent):
        written = torch_npu.npu_kv_rmsnorm_rope_cache(kv, gamma, angles, angles, slots, rope, latent, cache_mode="PA")
        return written[1].sum()  # a graph holds no operator whose results nobody uses

    filled = [[torch.zeros(2, 4, 1, size, **on) for size in (16, 32)] for _ in range(2)]
    total, expected = compiled(step)(kv, *filled[0]), step(kv, *filled[1])
    assert total == expected != 0
    for got, wanted in zip(*filled, strict=True):
        assert torch.equal(got, wanted)


def test_lengths_that_change_need_no_new_graph():
    """vllm-ascend hands lengths over as a list of numbers: they must not be frozen into the graph."""
    latent, table = torch.randn(4, 1, 8, 32, **on), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, **on)
    query = torch.randn(2, 3, 1, 32, **on)

    def attend(query, lengths):
        return torch_npu.npu_fused_infer_attention_score(
            query, latent, latent, num_heads=3, num_key_value_heads=1, input_layout="BNSD", block_table=table,
            block_size=8, actual_seq_lengths_kv=lengths,
        )[0]  # fmt: skip

    run = compiled(attend, dynamic=True)
    for lengths in ([4, 9], [5, 10], [6, 11], [16, 3]):
        assert torch.equal(run(query, lengths), attend(query, lengths))
    assert counters["stats"]["unique_graphs"] == 1


def test_scopes_and_waits_are_marks_in_the_graph():
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return torchair.get_npu_backend()(graph, inputs)

    def function(x, y):
        with torchair.scope.npu_stream_switch("second", 0):
            torchair.scope.npu_wait_tensor(x, y)
            x = x + 1
        with torchair.scope.super_kernel("block", "stream-fusion=1"):
            return torchair.scope.npu_wait_tensor(x, y) * 2

    out = torch.compile(function, backend=keep, fullgraph=True)(torch.ones(2, **on), torch.zeros(2, **on))
    assert out.tolist() == [4, 4]
    marks = [(node.target, node.args) for node in graphs[0].graph.nodes if "air" in str(node.target)]
    enter, leave, wait = torch.ops.air.scope_enter, torch.ops.air.scope_exit, torch.ops.air.wait_tensor
    assert [target for target, _ in marks] == [enter, wait, leave, enter, wait, leave]
    assert marks[0][1][1] == ["second", "0"] and marks[3][1][1] == ["block", "stream-fusion=1"]


def test_scopes_that_are_not_nested_rejected():
    with pytest.raises(Exception, match="leaves a scope that was not entered"):
        compiled(lambda x: torch.ops.air.scope_exit() or x + 1)(torch.ones(1, **on))
    with pytest.raises(Exception, match="1 scopes are entered but not left"):
        compiled(lambda x: torch.ops.air.scope_enter([], []) or x + 1)(torch.ones(1, **on))


class Cached(torch.nn.Module):
    """torchair caches compiled methods only."""

    def __init__(self, folder: Path):
        super().__init__()
        options = {"config": torchair.CompilerConfig(), "dynamic": True, "cache_dir": str(folder)}
        self.run = torchair.inference.cache_compile(self.block, **options)

    def block(self, x, gamma, weight):
        return block(x, gamma, weight)


def test_cached_compilation_compiles(tmp_path):
    inputs = [torch.randn(4, 8, **on), torch.randn(8, **on), torch.randn(8, 16, **on)]
    assert torch.equal(Cached(tmp_path).run(*inputs), block(*inputs)) and counters["stats"]["unique_graphs"] == 1


def numbers(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, **on)


CALLS = {
    "npu_rms_norm": lambda: ((torch.randn(3, 8, **on), torch.ones(8, **on)), {}),
    "npu_add_rms_norm": lambda: ((torch.randn(3, 8, **on), torch.ones(3, 8, **on), torch.ones(8, **on)), {}),
    "npu_swiglu": lambda: ((torch.randn(3, 8, **on),), {}),
    "npu_interleave_rope": lambda: ((torch.randn(3, 2, 1, 8, **on), *[torch.ones(3, 1, 1, 8, **on)] * 2), {}),
    "npu_moe_gating_top_k": lambda: ((torch.randn(5, 16, **on), 4), dict(k_group=2, group_count=4, norm_type=1)),
    "npu_moe_init_routing": lambda: (
        (torch.randn(2, 3, **on), numbers([0, 2], [1, 3]), numbers([4, 1], [0, 2])), dict(active_num=2),
    ),
    "npu_moe_compute_expert_tokens": lambda: ((numbers(0, 0, 2), 4), {}),
    "npu_moe_finalize_routing": lambda: (
        (torch.randn(4, 3, **on), *[None] * 3, torch.rand(2, 2, **on), numbers(0, 1, 2, 3), numbers([0, 1], [1, 0])),
        {},
    ),
    "npu_grouped_matmul": lambda: (
        ([torch.randn(4, 3, **on)], [torch.randn(2, 3, 5, **on)]),
        dict(group_list=numbers(1, 3, dtype=torch.int64), group_list_type=1, group_type=0, split_item=2),
    ),
}  # fmt: skip
for _layout, _query, _pages in [
    ("BSH", (2, 3, 32), (4, 8, 16)), ("BNSD", (2, 4, 1, 16), (4, 2, 8, 16)), ("BSND", (2, 1, 4, 16), (4, 2, 1, 8, 16)),
    ("TND", (2, 4, 16), (4, 8, 32)),
]:  # fmt: skip
    CALLS[f"npu_fused_infer_attention_score {_layout}"] = lambda layout=_layout, query=_query, pages=_pages: (
        (torch.randn(query, **on), torch.randn(pages, **on), torch.randn(pages, **on)),
        dict(num_heads=4, num_key_value_heads=2, input_layout=layout, block_table=numbers([0, 1], [2, 3]), block_size=8,
             actual_seq_lengths_kv=[3, 9], softmax_lse_flag=True,
             actual_seq_lengths=[1, 2] if layout == "TND" else None),
    )  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_shapes_in_a_graph_are_those_of_the_results(name):
    args, kwargs = CALLS[name]()
    operator = getattr(torch.ops.npu, name.split()[0]).default
    torch.library.opcheck(operator, args, kwargs, test_utils="test_faketensor")
