"""Control messages between training and a worker, and the layouts of weights that vLLM and Megatron renamed."""

import itertools
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from post_training.layouts.layout import WHOLE, LocalView, RolloutPlacement, Shard, TrainPlacement
from post_training.reshard.handover import HandoverError
from post_training.reshard.schedule import BucketError
from verl_plugin.alltoallv import control, transfer
from verl_plugin.alltoallv.addresses import control_path
from verl_plugin.alltoallv.control import Abandon, Begin, Control, Description, Hello, Inquiry
from verl_plugin.alltoallv.megatron_layout import fitted as megatron_fitted
from verl_plugin.alltoallv.rollout_layout import fitted, restore_expert_order, served_weights
from verl_plugin.alltoallv.settings import EXTENSION, SETTINGS_KEY, AlltoallvSettings
from verl_plugin.alltoallv.transfer import WeightTransfer

DESCRIPTION = Description({"w": ((2, 3), torch.float32)}, RolloutPlacement(1), AlltoallvSettings())


@pytest.fixture
def worker(tmp_path) -> Control:
    return Control(tmp_path / "worker.sock", DESCRIPTION)


@pytest.mark.parametrize(
    ("bucket_bytes", "key"),
    [
        (None, f"{SETTINGS_KEY}.bucket_megabytes=1024"),
        (4 << 20, "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=4"),
    ],
)
def test_bucket_that_is_too_small_named_by_its_key(tmp_path, monkeypatch, bucket_bytes, key):
    """Every rank counts all streams, so planning fails alike on all of them, and one rank is enough here."""

    def too_small() -> None:
        raise BucketError(1 << 20, streams=5, widest_row=1 << 20)

    monkeypatch.setattr(transfer, "Exporter", lambda **_: SimpleNamespace(prepare=too_small))
    monkeypatch.setattr(dist, "get_world_size", lambda _: 1)
    monkeypatch.setattr(dist, "all_gather_object", lambda reports, own, group: reports.__setitem__(0, own))
    monkeypatch.setattr(transfer, "table_for", lambda _: None)
    monkeypatch.setattr(transfer, "matrix_table", lambda _: None)
    monkeypatch.setattr(WeightTransfer, "_layouts", lambda *_: (None, None))
    report = transfer._Report("", model={}, serves=DESCRIPTION)
    monkeypatch.setattr(WeightTransfer, "_own_report", lambda _: report)
    found = WeightTransfer(None, None, None, torch.device("cpu"), bucket_bytes)
    with pytest.raises(HandoverError) as told:
        found._plan()
    assert str(told.value) == (
        f"{key} is invalid: a bucket of 1048576 bytes cannot hold a row of up to 1048576 bytes for each of 5 streams. "
        "Set it to 6 or more."
    )


def test_worker_describes_itself_and_learns_of_updates(tmp_path, worker):
    inquiry = Inquiry(tmp_path / "worker.sock")
    assert inquiry.greet() == DESCRIPTION
    inquiry.ask(Begin(7))
    assert worker.version == 7
    worker.check()  # this process is the trainer, and has not given up


def test_update_given_up_ends_the_waiting_once(tmp_path, worker):
    inquiry = Inquiry(tmp_path / "worker.sock")
    inquiry.ask(Begin(1))
    inquiry.ask(Abandon(1, "rank 2 is gone"))
    with pytest.raises(HandoverError, match="abandoned update 1: rank 2 is gone"):
        worker.check()
    worker.settle()
    worker.check()


def test_update_given_up_before_it_began_ends_no_later_one(tmp_path, worker):
    """Abandon an update that the worker waits for but was never told of, as when planning fails."""
    inquiry = Inquiry(tmp_path / "worker.sock")
    inquiry.ask(Abandon(1, "rank 2 has no worker"))
    with pytest.raises(HandoverError, match="abandoned update 1"):
        worker.check()
    worker.settle()
    inquiry.ask(Begin(2))
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


@pytest.mark.parametrize(("replicas", "data", "tensor"), [(1, 1, 2), (2, 1, 2), (2, 2, 1), (3, 2, 2)])
def test_worker_answers_the_training_rank_on_its_die(monkeypatch, replicas, data, tensor):
    """verl numbers workers within a replica, and training ranks across all replicas."""
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
    from vllm.distributed import parallel_state

    from verl_plugin.alltoallv.worker import _own_path

    monkeypatch.setenv("VERL_RAY_JOB_ID", "job")
    paths = []
    for replica, of_data, of_tensor in itertools.product(range(replicas), range(data), range(tensor)):
        monkeypatch.setenv("VERL_REPLICA_RANK", str(replica))
        monkeypatch.setattr(parallel_state, "get_dp_group", lambda at=of_data: SimpleNamespace(rank_in_group=at))
        monkeypatch.setattr(parallel_state, "get_tp_group", lambda at=of_tensor: SimpleNamespace(rank_in_group=at))
        sizes = {"tensor_parallel_size": tensor, "data_parallel_size": data, "data_parallel_size_local": data}
        config = SimpleNamespace(parallel_config=SimpleNamespace(**sizes, data_parallel_rank=of_data))
        worker: Any = SimpleNamespace(local_rank=of_tensor, model_runner=SimpleNamespace(vllm_config=config))
        upstream = re.findall(r"replica-(\d+)-rank-(\d+)", vLLMColocateWorkerExtension._get_zmq_handle(worker))
        ((first, within),) = ((int(a), int(b)) for a, b in upstream)
        paths.append(_own_path(config))
        assert paths[-1] == control_path("job", first * data * tensor + within)
    assert paths == [control_path("job", rank) for rank in range(replicas * data * tensor)]


class Layer(nn.Module):
    """The parameters of three vLLM-Ascend experts with hidden size 4 and width 5."""

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
    for name in ("w13_weight", "w2_weight"):  # like the wake-up in vllm_ascend/worker/worker.py
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


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_first_projections_of_a_vision_tower_lie_in_one_weight(kind):
    """vLLM 0.9 kept them apart. Each die has a shard of both; a decoder's are already one weight."""
    prefix, rest = "visual.blocks.0.mlp.", ((0, 4),) if kind == "weight" else ()
    gate, up = (Shard(f"{prefix}{name}.{kind}", ((6, 12), *rest), f"{prefix}{name}.{kind}")
                for name in ("gate_proj", "up_proj"))  # fmt: skip
    down = Shard(f"{prefix}down_proj.{kind}", ((0, 4), *rest), f"{prefix}down_proj.{kind}")
    fused = f"{prefix}gate_up_proj.{kind}"
    placed = fitted([gate, up, down], {fused: None})
    assert [(shard.hf_name, shard.local, shard.view.index) for shard in placed[:2]] == [
        (gate.hf_name, fused, ((0, 6),)),
        (up.hf_name, fused, ((6, 12),)),
    ]
    assert placed[2] is down and fitted([gate, up], {}) == [gate, up]


@pytest.mark.parametrize(
    "names",
    [
        ("mlp.experts.local_experts.1.linear_fc1.weight", "input_layernorm.weight"),
        ("mlp.experts.linear_fc1.weight1", "self_attention.linear_qkv.layer_norm_weight"),
    ],
)
def test_megatron_layers_of_either_kind_are_found(names):
    """Check the names of Megatron-core's own layers and of TransformerEngine's."""
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


@pytest.mark.parametrize(("tp", "cut"), [(1, False), (2, True), (4, True), (2, False)])
def test_first_projections_are_found_where_this_model_keeps_them(tp, cut):
    """Megatron-core shards their rows over tensor-parallel ranks; TransformerEngine's layers keep them whole."""
    prefix, rows, columns = "decoder.layers.1.self_attention.", {"q": 8, "kv": 4}, 6
    placement = TrainPlacement(tp, 1, 1, 2, (2,))
    names = {"q": ("q_a_proj", "linear_q_down_proj"), "kv": ("kv_a_proj_with_mqa", "linear_kv_down_proj")}
    for rank in range(2 * tp):
        shards, tensors, first = [], {}, 0
        for part, (hf, own) in names.items():
            fused = LocalView(index=((first, first + rows[part]),))
            local, bounds = f"{prefix}linear_qkv.weight", ((0, rows[part]), (0, columns))
            shards.append(Shard(f"model.layers.1.self_attn.{hf}.weight", bounds, local, fused))
            held = rows[part] // tp if cut else rows[part]
            tensors[f"{prefix}{own}.weight"] = torch.empty(held, columns)
            first += rows[part]
        found = megatron_fitted(shards, tensors, placement, rank)
        for shard, (part, (hf, own)) in zip(found, names.items(), strict=True):
            share = rows[part] // tp
            begin = rank % tp * share if cut else 0
            extent = share if cut else rows[part]
            expected = ((begin, begin + extent), (0, columns))
            assert (shard.hf_name, shard.local, shard.view) == (
                f"model.layers.1.self_attn.{hf}.weight",
                f"{prefix}{own}.weight",
                WHOLE,
            )
            assert shard.bounds == expected


@pytest.mark.parametrize(("tp", "dp", "experts_parallel"), [(1, 1, False), (2, 1, True), (2, 3, True), (4, 2, False)])
@pytest.mark.parametrize("shared", [None, "whole", "cut"])
def test_worker_describes_its_placement_and_weights(monkeypatch, tp, dp, experts_parallel, shared):
    """Try two shared experts of width 6, whole on each tensor-parallel rank or sharded over them, and none."""
    from verl_plugin.alltoallv import worker as module

    model, width = nn.Module(), 12
    model.norm = nn.Parameter(torch.ones(5, dtype=torch.bfloat16), requires_grad=False)
    if shared:
        model.shared_experts = nn.Module()
        model.shared_experts.down_proj = nn.Linear(
            width if shared == "whole" or tp == 1 else width // tp, 5, bias=False
        )
    text = {"moe_intermediate_size": 6, "n_shared_experts": 2} if shared else {}
    parallel = SimpleNamespace(tensor_parallel_size=tp, data_parallel_size=dp, enable_expert_parallel=experts_parallel)
    config = SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**text)),
        additional_config={"alltoallv": {"bucket_megabytes": 3, "discard_on_sleep": False}},
    )  # fmt: skip
    monkeypatch.setattr(module, "_problem", lambda *given: f"{given[2]}")
    found = module._description(SimpleNamespace(vllm_config=config, get_model=lambda: model), True)
    whole = shared == "whole" or (shared == "cut" and tp == 1)
    assert found.placement == RolloutPlacement(
        tp=tp, dp=dp, ep=tp * dp if experts_parallel else 1, shared_expert_replicated=whole
    )
    assert found.weights == {name: (tuple(each.shape), each.dtype) for name, each in model.named_parameters()}
    assert found.settings == AlltoallvSettings(3, discard_on_sleep=False) and found.problem == "True"
