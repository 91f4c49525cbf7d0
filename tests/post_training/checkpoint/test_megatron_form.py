"""Names and shapes of a layer's weights in MindSpeed-LLM's forms, written out for a small model."""

from __future__ import annotations

import pytest

from post_training.checkpoint.megatron_form import MegatronForm, local_shapes, rank_shards
from post_training.layouts.layout import TrainPlacement
from post_training.models.deepseek_v3 import DeepseekV3Shape

SHAPE = DeepseekV3Shape(
    hidden=16, intermediate=24, moe_intermediate=8, layers=3, dense_layers=1, heads=6, experts=4, shared_experts=1,
    q_lora=12, kv_lora=8, qk_nope=4, qk_rope=2, v_head=6, vocab=64, mtp_layers=1,
)  # fmt: skip


def placement(tp=1, stages=(2, 1), extend=False):
    return TrainPlacement(tp=tp, pp=len(stages), ep=1, dp=1, num_layer_list=stages, moe_tp_extend_ep=extend)


def shapes_of(form, rank):
    return local_shapes(rank_shards(SHAPE, form, rank))


@pytest.mark.parametrize("stages", [(3,), (2, 1)])
def test_prediction_layer_is_the_last_stages(stages):
    form = MegatronForm(placement(stages=stages), mtp_layers=1)
    *others, last = (shapes_of(form, rank) for rank in range(len(stages)))
    assert not any("mtp_layers" in name for each in others for name in each)
    own = {name.removeprefix("mtp_layers.0."): dims for name, dims in last.items() if name.startswith("mtp_layers.0.")}
    outside = {name: dims for name, dims in own.items() if not name.startswith("transformer_layer.")}
    # If the last stage is not the first, it has its own embedding.
    embedding = {"embedding.word_embeddings.weight": (64, 16)} if len(stages) > 1 else {}
    assert outside == {
        "enorm.weight": (16,), "hnorm.weight": (16,), "final_layernorm.weight": (16,), "eh_proj.weight": (16, 32),
        **embedding,
    }  # fmt: skip
    # The decoder's final norm is outside the decoder, since the prediction layer follows.
    assert last["final_layernorm.weight"] == (16,) and "decoder.final_layernorm.weight" not in last
    layer = {name.removeprefix("transformer_layer.") for name in own.keys() - outside.keys()}
    sparse = {name.removeprefix("decoder.layers.0.") for name in last if name.startswith("decoder.layers.0.")}
    if len(stages) > 1:
        assert layer == sparse
    plain = shapes_of(MegatronForm(placement(stages=stages)), len(stages) - 1)
    assert "decoder.final_layernorm.weight" in plain and not any("mtp" in name for name in plain)


def test_split_projections_have_the_rows_of_each_head():
    attention = "decoder.layers.0.self_attention."
    found = shapes_of(MegatronForm(placement(tp=2), mla_mm_split=True), 0)
    assert {name: found[attention + name] for name in (
        "linear_qk_nope.weight", "linear_qk_rope.weight", "linear_kv_nope.weight", "linear_v.weight"
    )} == {
        "linear_qk_nope.weight": (3 * 4, 12), "linear_qk_rope.weight": (3 * 2, 12), "linear_kv_nope.weight": (3 * 4, 8),
        "linear_v.weight": (3 * 6, 8),
    }  # fmt: skip
    assert not any(name.endswith(("linear_qb.weight", "linear_kvb.weight")) for name in found)


@pytest.mark.parametrize("rank", range(4))
def test_half_a_head_cannot_be_split(rank):
    """With six heads over four ranks, each rank has one and a half, so it begins or ends within a head."""
    form = MegatronForm(placement(tp=4, stages=(3,)), mla_mm_split=True)
    with pytest.raises(ValueError, match="needs whole heads on every tensor parallel rank"):
        rank_shards(SHAPE, form, rank)


def test_single_experts_have_weights_of_their_own():
    found = shapes_of(MegatronForm(placement(), moe_grouped_gemm=False), 1)
    experts = {name: dims for name, dims in found.items() if ".experts." in name}
    prefix = "decoder.layers.0.mlp.experts.local_experts."
    assert experts == {
        f"{prefix}{expert}.{name}.weight": dims
        for expert in range(4)
        for name, dims in (("linear_fc1", (16, 16)), ("linear_fc2", (16, 8)))
    }


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"placement": TrainPlacement(tp=1, pp=1, ep=1, dp=2, num_layer_list=(3,))}, "needs dp equal to ep"),
        ({"placement": placement(extend=True), "moe_grouped_gemm": False}, "moe-tp-extend-ep needs moe-grouped-gemm"),
        ({"placement": placement(), "mtp_layers": 2}, "at most one layer for multi-token prediction can be kept, not"),
    ],
)
def test_forms_that_cannot_be_are_rejected(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        MegatronForm(**changes)


def test_form_is_read_back_from_a_manifest():
    form = MegatronForm(placement(tp=2, stages=(1, 2)), mla_mm_split=True, moe_grouped_gemm=False, mtp_layers=1)
    assert MegatronForm.from_arguments(form.as_arguments()) == form
