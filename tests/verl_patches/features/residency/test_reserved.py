"""Rollout weights at fixed addresses, with vLLM-Ascend's own, unmodified allocator."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch_npu  # noqa: F401

from overlay import ConfigurationError
from post_training.reshard.generation import WeightsGeneration
from verl_patches.features.measure.step_record import current_record
from verl_patches.features.residency import registration, reserved
from verl_patches.features.residency.phases import Residency
from verl_patches.features.residency.reserved import ReservedMemory

pytestmark = pytest.mark.slow  # importing vLLM is slow

ELEMENTS = 1 << 16
CYCLE = ("update", "reshard", "rollout", "idle")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, own_context):
    generation = WeightsGeneration()
    monkeypatch.setattr(registration, "process_generation", lambda: generation)


@pytest.fixture
def allocator(monkeypatch):
    import torchair  # noqa: F401  vllm-ascend imports it first
    from vllm_ascend.device_allocator.camem import CaMemAllocator

    monkeypatch.setattr(CaMemAllocator, "instance", None)
    return CaMemAllocator.get_instance()


class Model(torch.nn.Module):
    """A weight that every reshard writes, a buffer that none writes, and weights derived by attention."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((ELEMENTS,), 3.0, device="npu"), requires_grad=False)
        self.register_buffer("table", torch.full((1000,), 7.0, device="npu"))
        self.impl = SimpleNamespace(W_UV=torch.ones(500, device="npu"), W_UK_T=torch.ones(600, device="npu")[100:])

    def places(self):
        return [t.data_ptr() for t in (self.weight, self.table, self.impl.W_UV, self.impl.W_UK_T)]


def built(reserves):
    """Return (residency, model) as the adapters leave them, without any training state."""
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    model = Model()
    runner = SimpleNamespace(
        get_model=lambda: model, vllm_config=config, kv_caches=[], initialize_kv_cache=lambda _: None,
        overlay_kv_cache_config=None,
    )  # fmt: skip
    if reserves:
        reserved.reserve_weights(runner)
    residency = Residency(lambda: True)
    registration.register_rollout(residency, runner, [model.weight])
    return residency, model


def cycled(reserves):
    """Run fifty cycles while other tensors take memory. Return addresses by cycle, and the number of wrong values."""
    residency, model = built(reserves)
    places, wrong, others = [], 0, []
    for number in range(50):
        residency.enter("update")
        others.append(torch.ones(ELEMENTS + number, device="npu"))
        residency.enter("reshard")
        with torch.no_grad():
            model.weight.fill_(number)
            model.impl.W_UV.fill_(number)
        others = others[-1:]
        residency.enter("rollout")
        places.append(model.places())
        wrong += sum(
            int((t != v).sum()) for t, v in ((model.weight, number), (model.table, 7), (model.impl.W_UV, number))
        )
        residency.enter("idle")
    return places, wrong


def test_no_address_changes_in_fifty_cycles_and_every_byte_is_right(allocator):
    places, wrong = cycled(reserves=True)
    assert not wrong
    assert places == places[:1] * 50


def test_without_it_addresses_change(allocator):
    places, wrong = cycled(reserves=False)
    assert not wrong
    assert len({place for place, *_ in places}) > 1


def test_physical_memory_leaves_and_comes_back_and_none_is_lost(allocator):
    residency, _ = built(reserves=True)
    free = torch.npu.mem_get_info()[0]
    for _ in range(3):
        residency.enter("update")
        assert torch.npu.mem_get_info()[0] >= free + 4 * ELEMENTS
        residency.enter("reshard")
        assert torch.npu.mem_get_info()[0] == free


def test_only_the_buffer_is_copied_to_the_host_and_once(allocator):
    residency, _ = built(reserves=True)
    for _ in range(3):
        for phase in CYCLE:
            residency.enter(phase)
    assert current_record().counts["residency/device_to_host_bytes"] == 4000


def test_recorded_memory_is_what_is_there_and_not_what_torch_counts(allocator):
    others = torch.npu.memory_allocated()
    residency, _ = built(reserves=True)
    counted = torch.npu.memory_allocated()
    assert counted > others + 4 * ELEMENTS
    for phase, there in (("update", others), ("reshard", counted), ("update", others)):
        residency.enter(phase)
        held = torch.ones(ELEMENTS, device="npu")
        takes = torch.npu.memory_allocated() - counted
        del held
        residency.close()
        assert current_record().allocated_bytes[phase] == there
        assert current_record().peak_bytes[phase] == there + takes > there + 4 * ELEMENTS
        assert torch.npu.memory_allocated() == counted, "torch does not see what is unmapped"


def test_a_pool_that_gets_no_memory_rejected():
    elsewhere = SimpleNamespace(use_memory_pool=contextlib.nullcontext, get_current_usage=lambda: 0)
    with pytest.raises(RuntimeError, match="the memory pool has 0 of 4000 bytes"):
        ReservedMemory(elsewhere).move([torch.ones(1000, device="npu").untyped_storage()])


@pytest.mark.parametrize("options", ["expandable_segments:True", "page_size:1g, expandable_segments: True"])
def test_expandable_segments_rejected_in_one_sentence(options, monkeypatch):
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", options)
    with pytest.raises(ConfigurationError, match="rollout_addresses=reserved .*Set it to released") as rejection:
        ReservedMemory(None)
    assert "\n" not in str(rejection.value)
