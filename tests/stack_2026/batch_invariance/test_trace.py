"""The trace of a token through a mixture of experts, where its rows are sorted by expert and gathered from engines."""

import torch
import torch_npu

from verl_plugin.batch_invariance.trace import OperatorCount, OperatorTrace, Place, Rows

TOKENS, WIDTH, CHOSEN = 5, 8, 2
EXPERTS = torch.tensor([[3, 0], [1, 2], [0, 3], [2, 1], [3, 1]], dtype=torch.int32)


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0))


def through_experts(order: list[int]) -> dict[Place, torch.Tensor]:
    """Return the results for the token 2 of a forward that sorts all tokens, given in an order of their own."""
    tokens, weights = drawn(TOKENS, WIDTH)[order].npu(), torch.full((TOKENS, CHOSEN), 0.5).npu()
    with OperatorTrace() as trace:
        trace.at(Rows(TOKENS, 1, ((order.index(2), 70),), None))
        rows, places = torch_npu.npu_moe_token_permute(tokens, EXPERTS[order].npu())
        torch_npu.npu_moe_token_unpermute(rows * 2, places, probs=weights)
    return {place: seen.row for place, seen in trace.trace[70].items()}


def test_rows_of_a_token_are_followed_while_sorted_by_expert():
    expected = {"npu_moe_token_permute": [1, 1], "mul": [2, 2], "npu_moe_token_unpermute": 2}
    for order in ([0, 1, 2, 3, 4], [2, 4, 0, 3, 1]):
        found = {place.operator.split(".")[1]: row for place, row in through_experts(order).items()}
        assert found.keys() == expected.keys()
        for name, times in expected.items():
            torch.testing.assert_close(found[name], drawn(TOKENS, WIDTH)[2] * torch.tensor(times)[..., None])


def test_rows_of_other_engines_tokens_are_skipped():
    own = Rows(TOKENS - 1, 1, ((3, 0),), None, gathered=2 * TOKENS, first=TOKENS)
    gathered = drawn(2 * TOKENS, WIDTH).npu()
    with OperatorTrace() as trace:
        trace.at(own)
        _ = gathered * 1
        _, places = torch_npu.npu_moe_token_permute(gathered, torch.cat([EXPERTS, EXPERTS]).npu())
        _ = drawn(2 * TOKENS * CHOSEN, WIDTH).npu() + 0
    rows = {place.operator.split(".")[1]: seen.row for place, seen in trace.trace[0].items()}
    assert torch.equal(rows["mul"], gathered[TOKENS + 3].cpu())
    of_token = places.view(-1, CHOSEN)[TOKENS + 3].long().cpu()
    assert torch.equal(rows["add"], drawn(2 * TOKENS * CHOSEN, WIDTH)[of_token])


def test_operators_are_counted_once_and_views_not():
    given = drawn(TOKENS, WIDTH).npu()
    with OperatorCount() as counted:
        (given.t() * 2).view(-1)
        torch.nn.functional.linear(given, drawn(3, WIDTH).npu())
    assert counted.calls["aten.mul.Tensor"] == 1 and counted.calls.total() >= 3
    assert not any("view" in name or name.startswith("aten.t.") for name in counted.calls)
