"""The layout of a critic covers its model without the output vocabulary, and its value head."""

from math import prod

import pytest

from post_training.layouts.layout import PADDING, RolloutPlacement, TrainPlacement
from post_training.layouts.value_model import HEAD_BIAS, HEAD_WEIGHT, value_table
from post_training.models.families import table_for

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 10,
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_element_of_the_critic_lies_on_some_rank_and_the_output_layer_on_none(tied, tp, pp):
    policy = table_for(QWEN2 | {"tie_word_embeddings": tied})
    table = value_table(policy)
    assert table.shapes.keys() == policy.shapes.keys() - {"lm_head.weight"} | {HEAD_WEIGHT, HEAD_BIAS}
    assert (table.shapes[HEAD_WEIGHT], table.shapes[HEAD_BIAS]) == ((1, 8), (1,))
    placement = TrainPlacement(tp=tp, pp=pp, ep=1, dp=2, num_layer_list=(2 // pp,) * pp)
    slices: dict[str, set] = {}
    for rank in range(placement.world_size):
        shards = table.megatron(placement, rank)
        last = placement.pp_rank(rank) == pp - 1
        heads = {shard.local: shard.hf_name for shard in shards if shard.local.startswith("output_layer.")}
        assert heads == ({"output_layer.weight": HEAD_WEIGHT, "output_layer.bias": HEAD_BIAS} if last else {})
        for shard in shards:
            if shard.hf_name != PADDING:
                slices.setdefault(shard.hf_name, set()).add(shard.bounds)
    covered = {
        name: sum(prod(stop - start for start, stop in bounds) for bounds in each) for name, each in slices.items()
    }
    assert covered == {name: prod(shape) for name, shape in table.shapes.items()}


@pytest.mark.parametrize("tp", [1, 2])
def test_the_head_of_virtual_stages_is_in_the_last_chunk(tp):
    """Megatron gives the output layer only to the model chunk that has the last layer."""
    table = value_table(table_for(QWEN2 | {"num_hidden_layers": 4}))
    placement = TrainPlacement(tp=tp, pp=2, ep=1, dp=1, num_layer_list=(1,) * 4, virtual_stages=2)
    for rank in range(placement.world_size):
        shards = table.megatron(placement, rank)
        of_layers = {shard.local.partition("decoder.")[0] for shard in shards if ".layers.3." in shard.hf_name}
        heads = sorted(shard.local for shard in shards if shard.hf_name in (HEAD_WEIGHT, HEAD_BIAS))
        assert heads == [f"{chunk}output_layer.{name}" for chunk in of_layers for name in ("bias", "weight")]
        norm = [shard.local for shard in shards if shard.hf_name == "model.norm.weight"]
        assert [local.partition("decoder.")[0] for local in norm] == list(of_layers)
    assert of_layers, "the last rank has the last layer"


def test_a_critic_is_not_served():
    with pytest.raises(ValueError, match="never served"):
        value_table(table_for(QWEN2)).vllm_ascend(RolloutPlacement(tp=1, dp=1, ep=1, instances=1), 0)
