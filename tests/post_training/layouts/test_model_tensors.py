"""Finding a model's live weights, and rebuilding the weights that MLA derives from them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from post_training.layouts.layout import LocalView, Shard
from post_training.layouts.model_tensors import rollout_tensors, train_tensors, wholly_covered
from post_training.reshard.mla_refresh import refresh_absorbed_weights

HEADS, NOPE, VALUE, LATENT = 3, 4, 5, 6


class Wrapper(nn.Module):
    """A wrapper that has the model as `module`, like Float16Module and DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def model() -> nn.Module:
    inner = nn.Linear(2, 3)
    inner.register_buffer("expert_bias", torch.zeros(3))
    inner.register_buffer("cos_cached", torch.zeros(3))
    return inner


def test_wrappers_are_taken_off_and_derived_buffers_left_out() -> None:
    inner = model()
    found = train_tensors([Wrapper(Wrapper(inner))])
    assert set(found) == {"weight", "bias", "expert_bias"}
    assert found["weight"] is inner.weight and found["expert_bias"] is inner.expert_bias
    assert set(rollout_tensors(inner)) == set(found)


def test_chunks_keep_their_names_apart() -> None:
    found = train_tensors(nn.ModuleList([Wrapper(model()), Wrapper(model())]))
    assert {name.split(".")[1] for name in found} == {"0", "1"}
    assert "chunks.1.weight" in found and len(found) == 6


def test_a_shared_parameter_appears_once() -> None:
    shared = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shared[1].weight = shared[0].weight
    assert "1.weight" not in rollout_tensors(shared)


def attention_model(weight: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> nn.Module:
    attention = nn.Module()
    attention.impl = SimpleNamespace(
        num_heads=HEADS,
        qk_nope_head_dim=NOPE,
        v_head_dim=VALUE,
        kv_lora_rank=LATENT,
        kv_b_proj=SimpleNamespace(weight=SimpleNamespace(data=weight)),
        W_UK_T=key,
        W_UV=value,
    )
    return nn.Sequential(nn.Linear(1, 1), attention)


def expected(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute key and value weights by definition: the first rows of each head give its keys, the others its values."""
    rows = weight.chunk(HEADS)
    return torch.stack([head[:NOPE] for head in rows]), torch.stack([head[NOPE:].t() for head in rows])


def test_absorbed_weights_are_rebuilt_in_place() -> None:
    weight = torch.randn(HEADS * (NOPE + VALUE), LATENT)
    key, value = torch.zeros(HEADS, NOPE, LATENT), torch.zeros(HEADS, LATENT, VALUE)
    built = attention_model(weight, key, value)
    assert refresh_absorbed_weights(built) == 1
    assert built[1].impl.W_UK_T is key and built[1].impl.W_UV is value
    assert torch.equal(key, expected(weight)[0]) and torch.equal(value, expected(weight)[1])


def test_absorbed_weights_whose_memory_was_given_back_are_made_anew() -> None:
    weight = torch.randn(HEADS * (NOPE + VALUE), LATENT)
    key, value = torch.zeros(HEADS, NOPE, LATENT), torch.zeros(HEADS, LATENT, VALUE)
    key.untyped_storage().resize_(0)
    built = attention_model(weight, key, value)
    refresh_absorbed_weights(built)
    assert torch.equal(built[1].impl.W_UK_T, expected(weight)[0])
    assert built[1].impl.W_UV is value


def test_a_quantised_projection_rejected() -> None:
    weight = torch.zeros(HEADS * (NOPE + VALUE), LATENT, dtype=torch.int8)
    with pytest.raises(TypeError, match="quantised"):
        refresh_absorbed_weights(attention_model(weight, torch.zeros(1), torch.zeros(1)))


def test_only_tensors_that_a_layout_names_whole_are_covered() -> None:
    tensors = {"whole": torch.zeros(4, 2), "part": torch.zeros(4, 2), "unnamed": torch.zeros(3)}
    shards = [
        Shard("a", ((0, 3), (0, 2)), "whole", LocalView(index=((0, 3),))),
        Shard("", ((0, 1), (0, 2)), "whole", LocalView(index=((3, 4),))),
        Shard("b", ((0, 3), (0, 2)), "part", LocalView(index=((0, 3),))),
    ]
    assert [id(tensor) for tensor in wholly_covered(tensors, shards)] == [id(tensors["whole"])]
