"""Operators that only the torch_npu of 2026 calls, against plain torch; prints the results as JSON.

Started by `test_torch_npu_2026` with the Python of that torch_npu.
"""

import json
from collections.abc import Callable

import torch
import torch_npu

DEVICE = "npu"
HEADS, TOKENS, SIZE = 2, 5, 16


def largest_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found.cpu().double() - expected.double()).abs().max().item()


def attention() -> float:
    """Causal attention of two heads that share one key, against the formula."""
    query = torch.randn(1, HEADS, TOKENS, SIZE, dtype=torch.float16)
    key, value = torch.randn(2, 1, 1, TOKENS, SIZE, dtype=torch.float16)
    hidden = torch.ones(TOKENS, TOKENS).triu(1).bool()
    found, _ = torch_npu.npu_fused_infer_attention_score_v2(
        query.to(DEVICE), key.to(DEVICE), value.to(DEVICE), atten_mask=hidden.to(DEVICE), num_query_heads=HEADS,
        num_key_value_heads=1, softmax_scale=SIZE**-0.5, input_layout="BNSD",
    )  # fmt: skip
    scores = (query.double() @ key.double().mT) * SIZE**-0.5
    return largest_difference(found, scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value.double())


def rotary(neighbours: bool) -> float:
    """A matrix determines which elements are rotated together: halves, as without it, or neighbours."""
    x, cos, sin = torch.randn(3, 1, HEADS, TOKENS, SIZE)
    places = torch.arange(SIZE)
    of = places ^ 1 if neighbours else (places + SIZE // 2) % SIZE
    sign = torch.where(places % 2 == 0 if neighbours else places < SIZE // 2, -1.0, 1.0)
    turn = torch.zeros(SIZE, SIZE)
    turn[of, places] = sign
    given = [tensor.to(DEVICE) for tensor in (x, cos, sin)]
    found = torch_npu.npu_rotary_mul(*given, "half", turn.to(DEVICE))
    return largest_difference(found, x * cos + x[..., of] * sign * sin)


def quantised_norm() -> int:
    """Count the numbers that differ, with a bias that is added before rounding."""
    first, second = torch.randn(2, TOKENS, SIZE, dtype=torch.float16)
    weight, bias = torch.rand(2, SIZE, dtype=torch.float16)
    scale = torch.full((SIZE,), 0.03, dtype=torch.float16)
    given = [tensor.to(DEVICE) for tensor in (first, second, weight, scale)]
    found, _, total = torch_npu.npu_add_rms_norm_quant(*given, None, bias.to(DEVICE))
    added = first.float() + second.float()
    normal = added * (added.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.float() + bias.float()
    assert torch.equal(total.cpu(), added.half())
    return int((found.cpu() != (normal / scale.float()).round().clamp(-128, 127)).sum())


def fast_gelu() -> float:
    """The operator and its gradient."""
    x = torch.randn(TOKENS, SIZE)
    ours, theirs = x.to(DEVICE).requires_grad_(), x.clone().requires_grad_()
    found, expected = torch_npu.npu_fast_gelu(ours), theirs * torch.sigmoid(1.702 * theirs)
    found.sum().backward(), expected.sum().backward()
    return max(largest_difference(found.detach(), expected.detach()), largest_difference(ours.grad, theirs.grad))


def drawn(graph: torch.npu.NPUGraph, results: list[torch.Tensor], seed: int | None) -> list[list[float]]:
    if seed is not None:
        torch.npu.manual_seed(seed)
    graph.replay()
    torch.npu.synchronize()
    return [result.flatten().tolist() for result in results]


def numbers_of_graphs() -> dict[str, bool]:
    """Replays draw new numbers, the seed brings the same ones back, and they have the right distribution."""
    weights, ones = torch.tensor([0.0, 1.0, 3.0], device=DEVICE), torch.ones(2000, device=DEVICE)
    draws: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], bool]]] = {
        "uniform": (lambda: torch.empty(2000, device=DEVICE).uniform_(2, 4), lambda x: abs(x.mean() - 3) < 0.1),
        "normal": (lambda: torch.empty(2000, device=DEVICE).normal_(5, 2), lambda x: abs(x.std() - 2) < 0.2),
        "random": (lambda: torch.empty(2000, device=DEVICE).random_(3, 9), lambda x: set(x.tolist()) == {*range(3, 9)}),
        "unbounded": (lambda: torch.empty(2000, device=DEVICE, dtype=torch.int8).random_(),
                      lambda x: 0 <= x.min() and x.max() > 100),
        "multinomial": (lambda: torch.multinomial(weights, 2000, True), lambda x: 0.7 < (x == 2).float().mean() < 0.8),
        "dropout": (lambda: torch.nn.functional.dropout(ones, 0.25), lambda x: 0.7 < (x > 0).float().mean() < 0.8),
    }  # fmt: skip
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        results = [draw() for draw, _ in draws.values()]
        again = draws["uniform"][0]()
    first = drawn(graph, [*results, again], 7)
    assert first[0] != first[-1], "the same numbers twice in a graph"
    second, repeated = drawn(graph, [*results, again], None), drawn(graph, [*results, again], 7)
    assert repeated == first
    found = {}
    for number, (name, (_, holds)) in enumerate(draws.items()):
        found[name] = second[number] != first[number] and bool(holds(torch.tensor(first[number])))
    return found


def main() -> None:
    torch.manual_seed(3)
    found = {
        "attention": attention(),
        "halves": rotary(neighbours=False),
        "neighbours": rotary(neighbours=True),
        "quantised": quantised_norm(),
        "fast GELU": fast_gelu(),
        "graphs": numbers_of_graphs(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
