"""The operators that permute tokens by a map of experts, as MindSpeed calls them, against Megatron-core's own code."""

import pytest
import torch
import torch_npu

TOKENS, EXPERTS, CHOSEN, HIDDEN = 23, 16, 4, 8
ROWS = TOKENS * CHOSEN


@pytest.fixture
def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, the experts that each has, and weights of these experts."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, scores.topk(CHOSEN).indices, True)
    return torch.randn(TOKENS, HIDDEN, generator=generator), chosen, scores * chosen


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a gradient for a tensor."""
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_are_in_order_of_experts(given, weighted):
    from megatron.core.transformer.moe.moe_utils import permute

    tokens, chosen, weights = (each.clone() for each in given)
    expected, of_rows, origins = permute(
        tokens.requires_grad_(), chosen, weights.requires_grad_() if weighted else None
    )
    found, found_weights, places = torch_npu.npu_moe_token_permute_with_routing_map(
        given[0].npu(), chosen.npu(), probs=given[2].npu() if weighted else None, num_out_tokens=ROWS
    )
    assert torch.equal(found.cpu(), expected)
    # Copy i is of token i // CHOSEN.
    assert torch.equal(origins[places.cpu().long()], torch.arange(ROWS) // CHOSEN)
    gradients = [like(expected)]
    if weighted:
        assert torch.equal(found_weights.cpu(), of_rows)
        gradients.append(like(of_rows))
    torch.autograd.backward([expected, of_rows][: len(gradients)], gradients)
    of_tokens, of_weights = torch_npu.npu_moe_token_permute_with_routing_map_grad(
        gradients[0].npu(), gradients[1].npu() if weighted else None, places, chosen.npu(), EXPERTS, TOKENS, False
    )
    torch.testing.assert_close(of_tokens.cpu(), tokens.grad)
    if weighted:
        torch.testing.assert_close(of_weights.cpu(), weights.grad)


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_of_a_token_are_added(given, weighted):
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    tokens, chosen, weights = given
    rows, _, origins = permute(tokens, chosen)
    rows, weights = (rows + like(rows)).requires_grad_(), weights.clone().requires_grad_()
    expected = unpermute(rows, origins, tokens.shape, weights if weighted else None, chosen)
    *_, places = torch_npu.npu_moe_token_permute_with_routing_map(tokens.npu(), chosen.npu(), num_out_tokens=ROWS)
    own = [each.detach().npu() if weighted else None for each in (weights, chosen, rows)]
    found, *_, of_rows = torch_npu._npu_moe_token_unpermute_with_routing_map(
        rows.detach().npu(), places, tokens.shape, probs=own[0], routing_map=own[1]
    )
    torch.testing.assert_close(found.cpu(), expected)
    gradient = like(expected)
    expected.backward(gradient)
    by_rows, by_weights = torch_npu.npu_moe_token_unpermute_with_routing_map_grad(
        gradient.npu(), places, places, routing_map=own[1], permuted_tokens=own[2], probs=own[0],
        drop_and_pad=False, restore_shape=tokens.shape,
    )  # fmt: skip
    torch.testing.assert_close(by_rows.cpu(), rows.grad)
    if weighted:
        assert torch.equal(of_rows.cpu(), weights.detach().T.masked_select(chosen.T))
        torch.testing.assert_close(by_weights.cpu(), weights.grad)


def test_tokens_with_different_numbers_of_experts_rejected(given):
    tokens, chosen, _ = given
    chosen[0] = False
    with pytest.raises(RuntimeError, match="equally many experts"):
        torch_npu.npu_moe_token_permute_with_routing_map(tokens.npu(), chosen.npu(), num_out_tokens=ROWS)
        torch.npu.synchronize()
