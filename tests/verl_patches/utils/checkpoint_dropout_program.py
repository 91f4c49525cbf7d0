"""One rank saves and loads by verl's Megatron checkpoint manager, with dropout's random numbers in Megatron's tracker.

Writes ``rank0.json``; test_checkpoint_dropout.py checks it.
"""

import verl_patches.prelude_patch  # noqa: F401

# isort: split
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

from tests.verl_patches.features.training_checkpoint.ranks import ONE, full_states, rank_of
from verl_patches.features import settings
from verl_patches.features.training_checkpoint.background import process_writer
from verl_patches.utils.checkpoint import megatron_checkpoint_manager as patches

ELEMENTS = 1000


def dropped() -> dict[str, list[int]]:
    """Return the indices that dropout zeroes: with the default generator, and with each of Megatron's tracked ones."""
    ones, tracker = torch.ones(ELEMENTS, device="npu"), tensor_parallel.get_cuda_rng_tracker()
    found = {"everywhere": torch.dropout(ones, 0.1, train=True)}
    for name in tracker.get_states():
        with tracker.fork(name):
            found[name] = torch.dropout(ones, 0.1, train=True)
    return {name: values.eq(0).nonzero().flatten().tolist() for name, values in found.items()}


def main(folder: Path) -> None:
    torch.npu.set_device(0)
    dist.init_process_group("hccl")
    parallel_state.initialize_model_parallel()
    settings.activate(settings.OverlaySettings())
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    dropped()
    manager: Any = SimpleNamespace(role="actor")
    with mock.patch.object(patches, "_rank_of", return_value=rank_of("qwen2", ONE, 0, full_states("qwen2"))):
        MegatronCheckpointManager.save_checkpoint(manager, str(folder / "saved"))
        process_writer().finish()
        after_saving = [dropped(), dropped()]
        MegatronCheckpointManager.load_checkpoint(manager, str(folder / "saved"))
    after_loading = [dropped(), dropped()]
    (folder / "rank0.json").write_text(json.dumps({"saved": after_saving, "loaded": after_loading}))
