from types import SimpleNamespace

import torch
import torch_npu  # noqa: F401

from post_training.live_tensors import gradient_tensors, optimizer_tensors, parameter_tensors
from post_training.reshard.mla_refresh import absorbed_tensors
from verl_patches.features.residency.kv_cache import CONFIGURATION, KvCache
from verl_patches.features.residency.storages import StorageGroup, device_storages


class FlatBuffers(torch.nn.Module):
    """Holds parameters as Megatron's DDP does: views of one flat tensor, in an attribute that hides `buffers()`."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        parameters = list(module.parameters())
        flat = torch.cat([p.data.view(-1) for p in parameters])
        offset = 0
        for parameter in parameters:
            parameter.data = flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
        self.buffers = [SimpleNamespace(param_data=flat, grad_data=torch.ones_like(flat))]
        self.expert_parallel_buffers = []


def test_model_with_flat_buffers_has_one_parameter_storage_and_its_own_buffers():
    module = torch.nn.BatchNorm1d(8).npu()
    chunk = FlatBuffers(module)
    storages = device_storages(parameter_tensors([chunk]))
    assert len(storages) == 1 + len(list(module.buffers()))
    assert len(device_storages(gradient_tensors([chunk]))) == 1


def test_a_flat_buffer_is_named_itself_where_megatron_keeps_parameters_in_it():
    """Without the distributed optimizer, Megatron's flat buffer holds only gradients."""
    chunk = FlatBuffers(torch.nn.Linear(4, 4).npu())
    (buffer,) = chunk.buffers
    own = list(chunk.module.parameters())
    first, *others = parameter_tensors([chunk])
    assert first is buffer.param_data and all(a is b for a, b in zip(others, own, strict=True))
    buffer.param_data = None
    assert all(a is b for a, b in zip(parameter_tensors([chunk]), own, strict=True))


def test_plain_model():
    module = torch.nn.Linear(4, 4).npu()
    assert len(device_storages(parameter_tensors([module]))) == 2
    assert not list(gradient_tensors([module]))


def test_optimizer_state_exists_after_the_first_step_and_weights_are_left_to_their_own_group():
    module = torch.nn.Linear(4, 4).npu()
    inner = torch.optim.AdamW(module.parameters(), lr=0.1)
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])
    group = StorageGroup(lambda: optimizer_tensors(optimizer), excluding=lambda: parameter_tensors([module]))
    module(torch.ones(2, 4, device="npu")).sum().backward()
    inner.step()
    moments = [value for state in inner.state.values() for value in state.values() if value.device.type == "npu"]
    assert moments
    expected = [m.cpu().clone() for m in moments]
    group.offload()
    assert all(m.untyped_storage().nbytes() == 0 for m in moments)
    assert module.weight.untyped_storage().nbytes()
    group.onload()
    assert all(torch.equal(m.cpu(), e) for m, e in zip(moments, expected, strict=True))


def test_absorbed_weights_are_found():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].impl = SimpleNamespace(W_UV=torch.ones(1), W_UK_T=torch.zeros(1))
    model[1].impl = SimpleNamespace()
    assert [tensor.item() for tensor in absorbed_tensors(model)] == [1.0, 0.0]


class Runner:
    """The part of vLLM-Ascend's model runner that owns a KV cache."""

    def __init__(self):
        self.layer = SimpleNamespace(kv_cache=[])
        context = {"layer.0": self.layer, "experts": SimpleNamespace()}
        self.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
        self.kv_caches = []
        setattr(self, CONFIGURATION, 4096)
        self.initialize_kv_cache(4096)

    def initialize_kv_cache(self, configuration):
        assert not self.kv_caches
        cache = torch.zeros(configuration, dtype=torch.uint8, device="npu")
        self.kv_caches.append(cache)
        self.layer.kv_cache = [cache]


def test_kv_cache_memory_leaves_and_the_same_cache_is_made_again():
    before = torch.npu.memory_allocated()
    runner = Runner()
    cache = KvCache(runner)
    cache.onload()
    cache.offload()
    cache.offload()
    assert torch.npu.memory_allocated() == before
    assert not runner.kv_caches
    cache.onload()
    assert runner.layer.kv_cache[0] is runner.kv_caches[0]
    assert runner.kv_caches[0].numel() == 4096
