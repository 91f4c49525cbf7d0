"""Placements are read from engines of vLLM-Ascend, at the cluster's commit and the release, and from Megatron."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest

import verl_patches.prelude_patch  # noqa: F401
from post_training.layouts.placements import PlacementError, rollout_placement, train_placement
from tests.demonstrations.vllm_patches import module_with

GRAPH = SimpleNamespace(enabled=True, enable_multistream_moe=True)
ASCEND = SimpleNamespace(
    expert_map_path=None, dynamic_eplb=False, enable_prefill_optimizations=False, torchair_graph_config=GRAPH
)
AT_THE_PIN = {
    "tensor_parallel_size": 2,
    "data_parallel_size": 2,
    "pipeline_parallel_size": 1,
    "enable_expert_parallel": True,
}


@contextmanager
def rank_of(world: int, rank: int, tensor_rank: int, ascend=ASCEND):
    """Let this process act as a rank of vLLM."""
    groups = {
        "get_tp_group": lambda: SimpleNamespace(rank_in_group=tensor_rank),
        "get_ep_group": lambda: SimpleNamespace(rank_in_group=rank % 4),
    }
    state = SimpleNamespace(**groups)
    with (
        mock.patch.multiple("torch.distributed", get_rank=lambda: rank, get_world_size=lambda: world),
        module_with("vllm.distributed", parallel_state=state),
        module_with("vllm_ascend.ascend_config", get_ascend_config=lambda: ascend),
    ):
        yield


@pytest.mark.parametrize(("of_release", "expected"), [({}, 2), ({"lmhead_tp_size": -1}, 2), ({"lmhead_tp_size": 4}, 4)])
def test_the_output_layer_has_a_size_of_its_own_only_where_it_is_set(of_release, expected):
    config = SimpleNamespace(parallel_config=SimpleNamespace(**AT_THE_PIN, **of_release))
    with rank_of(world=8, rank=5, tensor_rank=1):
        placement = rollout_placement(config)
    assert (placement.tp, placement.dp, placement.ep, placement.instances) == (2, 2, 4, 2)
    assert placement.lm_head_size == expected and placement.shared_expert_replicated


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("multistream", [False, True])
@pytest.mark.parametrize("optimizations", [False, True])
def test_the_shared_expert_is_whole_as_vllm_ascend_decides(graph, multistream, optimizations):
    """Its DeepSeek model reads each key in only one of the two modes (`models/deepseek_v2.py`, AscendDeepseekV2MoE).

    An `or` of the two keys, or a key read in the other mode, gets at least two of the eight cases wrong.
    """
    torchair = SimpleNamespace(enabled=graph, enable_multistream_moe=multistream)
    chosen = SimpleNamespace(
        expert_map_path=None, dynamic_eplb=False, enable_prefill_optimizations=optimizations,
        torchair_graph_config=torchair,
    )  # fmt: skip
    with rank_of(world=8, rank=5, tensor_rank=1, ascend=chosen):
        placement = rollout_placement(SimpleNamespace(parallel_config=SimpleNamespace(**AT_THE_PIN)))
    streams = multistream and graph
    prefills = optimizations and not graph
    assert placement.shared_expert_replicated == (streams or prefills)


def test_another_order_of_ranks_rejected():
    config = SimpleNamespace(parallel_config=SimpleNamespace(**AT_THE_PIN))
    with rank_of(world=8, rank=5, tensor_rank=0), pytest.raises(PlacementError, match="rank 5 is"):
        rollout_placement(config)


def _among_replicas(value: int, context: int, with_context_parallel: bool = False) -> int:
    return value if with_context_parallel else value // context


@contextmanager
def rank_of_megatron(rank: int, tensor: int, stage: int, replica: int, expert: int, experts: int = 2, context: int = 1):
    """Let this process act as a Megatron rank with TP2, PP2, two replicas and experts over `experts` ranks, on 8 dies.

    With `context` 2 the two replicas share sequences.
    """
    values = {
        "get_tensor_model_parallel_world_size": 2,
        "get_pipeline_model_parallel_world_size": 2,
        "get_virtual_pipeline_model_parallel_world_size": None,
        "get_expert_model_parallel_world_size": experts,
        "get_tensor_model_parallel_rank": tensor,
        "get_pipeline_model_parallel_rank": stage,
        "get_expert_model_parallel_rank": expert,
    }
    state = SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})
    for name, value in (("world_size", 2), ("rank", replica)):
        setattr(state, f"get_data_parallel_{name}", partial(_among_replicas, value, context))
    with (
        mock.patch("torch.distributed.get_rank", lambda: rank),
        module_with("megatron.core", parallel_state=state),
        module_with("verl.utils.megatron_utils", get_transformer_layer_offset=lambda stage, chunk, config: 2 * stage),
    ):
        yield


def test_another_order_of_megatrons_ranks_rejected():
    """In the order tp-cp-ep-dp-pp, rank 6 is tensor-parallel rank 0 of the second replica in stage 1."""
    config = SimpleNamespace(num_layers=3)
    with rank_of_megatron(6, tensor=0, stage=1, replica=1, expert=1):
        placement = train_placement(config)
    assert (placement.tp, placement.pp, placement.ep, placement.dp) == (2, 2, 2, 2)
    assert placement.num_layer_list == (2, 1)
    right = {"tensor": 0, "stage": 1, "replica": 1, "expert": 1}
    for name, value in (("tensor", 1), ("stage", 0), ("replica", 0), ("expert", 0)):
        with (
            rank_of_megatron(6, **(right | {name: value})),
            pytest.raises(PlacementError, match="rank 6 is .*reshard needs"),
        ):
            train_placement(config)


@pytest.mark.parametrize("rank", range(8))
def test_ranks_that_share_sequences_hold_the_same_weights(rank):
    coordinates = {"tensor": rank % 2, "stage": rank // 4, "replica": rank // 2 % 2, "expert": rank // 2 % 2}
    placements = []
    for context in (1, 2):
        with rank_of_megatron(rank, **coordinates, context=context):
            placements.append(train_placement(SimpleNamespace(num_layers=3)))
    assert placements[0] == placements[1] and placements[1].dp == 2


@pytest.mark.parametrize("rank", range(8))
def test_whole_experts_may_lie_on_tensor_parallel_ranks_too(rank):
    """If experts are whole, Megatron-core 0.16 numbers expert ranks through all ranks of a stage."""
    coordinates = {"tensor": rank % 2, "stage": rank // 4, "replica": rank // 2 % 2}
    with rank_of_megatron(rank, **coordinates, expert=rank % 4, experts=4):
        placement = train_placement(SimpleNamespace(num_layers=3), whole_experts=True)
        assert placement.moe_tp_extend_ep and (placement.ep, placement.tp_ep_rank(rank)) == (2, rank % 4)
        with pytest.raises(ValueError, match="expert parallel size 4 must divide data parallel size 2"):
            train_placement(SimpleNamespace(num_layers=3))
    with (
        rank_of_megatron(rank, **coordinates, expert=(rank + 1) % 4, experts=4),
        pytest.raises(PlacementError, match="which reshard needs"),
    ):
        train_placement(SimpleNamespace(num_layers=3), whole_experts=True)


@pytest.mark.parametrize(("stages", "chunks", "layers"), [(2, 1, 6), (2, 2, 8), (2, 3, 12), (4, 2, 16)])
def test_layers_of_virtual_stages_are_those_of_verl(stages, chunks, layers):
    """Compare with verl's own layer offset of every chunk of every stage, with Megatron's configuration and TP2."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig
    from verl.utils.megatron_utils import get_transformer_layer_offset

    virtual = chunks if chunks > 1 else None
    config = TransformerConfig(
        num_layers=layers, hidden_size=8, num_attention_heads=2, pipeline_dtype="bf16", tensor_model_parallel_size=2,
        pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=virtual,
    )  # fmt: skip
    in_a_chunk = layers // stages // chunks
    for rank in range(2 * stages):
        state = {
            "tensor_model_parallel_world_size": 2,
            "pipeline_model_parallel_world_size": stages,
            "virtual_pipeline_model_parallel_world_size": virtual,
            "expert_model_parallel_world_size": 1,
            "data_parallel_world_size": 1,
            "tensor_model_parallel_rank": rank % 2,
            "pipeline_model_parallel_rank": rank // 2,
            "data_parallel_rank": 0,
            "expert_model_parallel_rank": 0,
        }
        # The data-parallel size and rank are asked for with the ranks that share sequences.
        read = {f"get_{name}": lambda value=value, **_: value for name, value in state.items()}
        with (
            mock.patch.multiple(parallel_state, **read),
            mock.patch("torch.distributed.get_rank", lambda rank=rank: rank),
        ):
            found = [(slot.layer, slot.chunk, slot.position) for slot in train_placement(config).layers(rank)]
            numbers = range(chunks) if virtual else [None]
            offsets = [get_transformer_layer_offset(rank // 2, number, config) for number in numbers]
        assert found == [(first + at, chunk, at) for chunk, first in enumerate(offsets) for at in range(in_a_chunk)]
