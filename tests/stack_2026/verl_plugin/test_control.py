"""What training and a worker say to each other beside the weights, and the layouts of what both have renamed."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from post_training.layouts.layout import WHOLE, LocalView, RolloutPlacement, Shard, TrainPlacement
from post_training.reshard.handover import HandoverError
from verl_plugin.alltoallv import control
from verl_plugin.alltoallv.control import Abandon, Begin, Control, Description, Hello, Inquiry
from verl_plugin.alltoallv.megatron_layout import fitted as megatron_fitted
from verl_plugin.alltoallv.rollout_layout import fitted, restore_expert_order, served_weights
from verl_plugin.alltoallv.settings import EXTENSION, AlltoallvSettings

DESCRIPTION = Description({"w": ((2, 3), torch.float32)}, RolloutPlacement(1), AlltoallvSettings())


@pytest.fixture
def worker(tmp_path) -> Control:
    return Control(tmp_path / "worker.sock", DESCRIPTION)


def test_worker_describes_itself_and_learns_of_updates(tmp_path, worker):
    inquiry = Inquiry(tmp_path / "worker.sock")
    assert inquiry.greet() == DESCRIPTION
    inquiry.ask(Begin(7))
    assert worker.version == 7
    worker.check()  # this very process trains, and has given nothing up


def test_update_given_up_ends_the_waiting_once(tmp_path, worker):
    inquiry = Inquiry(tmp_path / "worker.sock")
    inquiry.ask(Begin(1))
    inquiry.ask(Abandon(1, "rank 2 is gone"))
    with pytest.raises(HandoverError, match="gave up update 1: rank 2 is gone"):
        worker.check()
    worker.settle()
    worker.check()


def test_training_process_that_ended_is_noticed(tmp_path, worker):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    Inquiry(tmp_path / "worker.sock").ask(Hello(child.pid))
    worker.check()
    child.communicate(b"\n")
    with pytest.raises(HandoverError, match=f"the training process {child.pid} of this die ended"):
        worker.check()


def test_missing_extension_rejected_with_its_key(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "START_SECONDS", 0.0)
    with pytest.raises(HandoverError, match=f"worker_extension_cls is invalid: .* Set it to {EXTENSION}."):
        Inquiry(tmp_path / "nobody.sock")


class Layer(nn.Module):
    """The parameters of vLLM-Ascend's experts: three of them, with hidden size 4 and width 5."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.experts = nn.Module()
        self.mlp.experts.w13_weight = nn.Parameter(torch.randn(3, 4, 10), requires_grad=False)
        self.mlp.experts.w2_weight = nn.Parameter(torch.randn(3, 5, 4), requires_grad=False)


def test_experts_are_in_file_order_before_and_after_waking():
    layer = Layer()
    before = {name: tensor.clone() for name, tensor in served_weights(layer).items()}
    assert [tuple(tensor.shape) for tensor in before.values()] == [(3, 10, 4), (3, 4, 5)]
    addresses = [parameter.data_ptr() for parameter in layer.parameters()]
    for name in ("w13_weight", "w2_weight"):  # as vllm_ascend/worker/worker.py wakes them
        awoken = getattr(layer.mlp.experts, name).transpose(1, 2)
        setattr(layer.mlp.experts, name, nn.Parameter(awoken, requires_grad=False))
    assert all(torch.equal(tensor, before[name]) for name, tensor in served_weights(layer).items())
    restore_expert_order(layer)
    assert [tuple(parameter.shape) for parameter in layer.parameters()] == [(3, 4, 10), (3, 5, 4)]
    assert all(parameter.is_contiguous() for parameter in layer.parameters())
    assert [parameter.data_ptr() for parameter in layer.parameters()] == addresses
    assert all(torch.equal(tensor, before[name]) for name, tensor in served_weights(layer).items())


def test_first_projections_of_mla_lie_in_one_weight():
    prefix = "model.layers.0.self_attn."
    query = Shard(f"{prefix}q_a_proj.weight", ((0, 6), (0, 4)), f"{prefix}q_a_proj.weight")
    key = Shard(f"{prefix}kv_a_proj_with_mqa.weight", ((0, 3), (0, 4)), f"{prefix}kv_a_proj_with_mqa.weight")
    fused = f"{prefix}fused_qkv_a_proj.weight"
    placed = fitted([query, key], {fused: None})
    assert [(shard.local, shard.view) for shard in placed] == [
        (fused, LocalView(index=((0, 6),))),
        (fused, LocalView(index=((6, 9),))),
    ]
    assert fitted([query, key], {}) == [query, key]


@pytest.mark.parametrize(
    "names",
    [
        ("mlp.experts.local_experts.1.linear_fc1.weight", "input_layernorm.weight"),
        ("mlp.experts.linear_fc1.weight1", "self_attention.linear_qkv.layer_norm_weight"),
    ],
)
def test_megatron_layers_of_either_kind_are_found(names):
    """Megatron-core's own layers, and TransformerEngine's."""
    expert, norm = (f"decoder.layers.0.{name}" for name in names)
    tensors = {expert: torch.empty(10, 4), norm: torch.empty(4)}
    grouped = LocalView((3, 4, 10), (1, (0, 4), (5, 10)), transposed=True)
    up = Shard("up", ((0, 5), (0, 4)), "decoder.layers.0.mlp.experts.weight1", grouped)
    before = Shard("norm", ((0, 4),), "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight")
    placement = TrainPlacement(1, 1, 1, 1, (1,))
    placed = megatron_fitted([up, before], tensors, placement, 0)
    assert placed == [
        Shard("up", up.bounds, expert, LocalView(index=((5, 10),))),
        Shard("norm", before.bounds, norm, WHOLE),
    ]
