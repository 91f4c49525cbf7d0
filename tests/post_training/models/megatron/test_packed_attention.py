"""The mask of packed attention is correct, although the emulator does not read it in causal modes; a device does."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import verl_patches.prelude_patch  # noqa: F401

LENGTH, HEADS, SIZE = 7, 2, 4


@pytest.mark.parametrize("earlier_diagonal", [False, True])
def test_the_mask_hides_what_comes_later_and_nothing_else(earlier_diagonal):
    """The mask's corner, used as an ordinary mask, gives torch's causal attention; another diagonal does not."""
    import torch_npu

    from post_training.models.megatron.packed_attention import PackedSequences, packed_causal_attention

    query, key, value = torch.randn(3, LENGTH, HEADS, SIZE)
    sequences = PackedSequences([LENGTH], torch.arange(LENGTH))
    with mock.patch.object(torch_npu, "npu_fusion_attention", wraps=torch_npu.npu_fusion_attention) as operator:
        packed_causal_attention(query.npu(), key.npu(), value.npu(), sequences, scale=0.5)
    mask = operator.call_args.kwargs["atten_mask"]
    assert mask.shape == (2048, 2048)
    corner = mask[:LENGTH, :LENGTH]
    if earlier_diagonal:
        corner = corner.triu(2)
    heads_first = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    expected = scaled_dot_product_attention(*heads_first, is_causal=True, scale=0.5)
    on_device = [tensor.npu() for tensor in heads_first]
    found = torch_npu.npu_fusion_attention(
        *on_device, HEADS, "BNSD", atten_mask=corner.contiguous(), scale=0.5, sparse_mode=1
    )[0]
    assert torch.allclose(found.cpu(), expected, atol=1e-5) != earlier_diagonal


@pytest.mark.parametrize(
    ("of_the_configuration", "own", "rejected"), [(0.0, None, 0), (0.1, None, 0.1), (0.1, 0.0, 0), (0.0, 0.2, 0.2)]
)
def test_dropout_rejected_wherever_it_is_asked_for(of_the_configuration, own, rejected):
    """Megatron's layers take dropout from the configuration or pass it themselves."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from post_training.models.megatron.packed_attention import PackedDotProductAttention

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=of_the_configuration
    )
    with pytest.raises(ValueError, match=f"attention_dropout is {rejected}") if rejected else nullcontext():
        PackedDotProductAttention(config, 1, None, "self", own)
