"""Memory managed by vLLM-Ascend's sleep mode is metered only while the engine is awake."""

import sys
from types import SimpleNamespace

import torch
import torch_npu  # noqa: F401

from verl_patches.features.measure import step_record
from verl_patches.features.residency.phases import Residency
from verl_patches.features.residency.sleeping import SleepingEngine


def test_a_phase_in_which_the_engine_sleeps_has_nothing_of_it(monkeypatch, own_context):
    pool = torch.ones(1 << 20, dtype=torch.uint8, device="npu")
    allocator = SimpleNamespace(get_instance=lambda: SimpleNamespace(get_current_usage=lambda: pool.nbytes))
    camem = SimpleNamespace(CaMemAllocator=allocator)
    monkeypatch.setitem(sys.modules, "vllm_ascend.device_allocator.camem", camem)
    residency, engine = Residency(lambda: False), SleepingEngine()
    residency.register("kv_cache", engine)
    residency.enter("reshard")
    residency.enter("rollout")
    residency.close()
    engine.asleep = True
    residency.enter("idle")
    residency.enter("update")
    residency.close()
    peaks = step_record.current_record().peak_bytes
    assert peaks["rollout"] - peaks["update"] == pool.nbytes == peaks["rollout"] - peaks["idle"]
    assert engine.onload() == engine.offload() == 0
