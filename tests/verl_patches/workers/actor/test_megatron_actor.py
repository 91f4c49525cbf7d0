"""A batch whose tensors share one storage, on the device, before Megatron's schedules."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch_npu  # noqa: F401
from tensordict import TensorDict

from tests.npu_emulator.operators.compare import refused
from verl_patches.workers.actor.megatron_actor import forward_backward_batch


def test_whole_numbers_of_64_bits_get_storages_of_their_own():
    """TensorDict's own clone, the control, adds 0 to all tensors by an operator that does not support int64."""
    together = torch.arange(6, device="npu")
    batch = TensorDict({"position_ids": together[:2], "responses": together[2:4]}, [2], device="npu")
    data = SimpleNamespace(batch=batch)
    seen = forward_backward_batch(lambda actor, data: data.batch, None, data)
    for name in ("position_ids", "responses"):
        assert torch.equal(seen[name], batch[name]) and seen[name].untyped_storage().nbytes() == 16
    with refused("Tensor x not implemented for DT_INT64"):
        batch.clone()
