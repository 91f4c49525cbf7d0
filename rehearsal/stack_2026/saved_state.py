"""Digests of the state that verl saved of a step: equal if weights, optimizer, schedule and data position are equal."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Megatron-core's files of tensors. Its other files describe them, with names drawn at each save.
_BYTES = (".distcp", ".safetensors")
# Generators of an FSDP2 process: verl gives them other seeds in every run, and training draws nothing from them.
_DRAWN = "rng"


def digests_of(step: Path) -> dict[str, str]:
    """Return the SHA-256 of the content of each file in a step's folder, by its path there.

    Args:
        step: `global_step_N` of a run of verl 0.9.1, on FSDP2 or Megatron-core.
    """
    found = {}
    for file in sorted(path for path in step.rglob("*") if path.is_file()):
        digest = hashlib.sha256()
        if file.suffix in _BYTES:
            digest.update(file.read_bytes())
        elif file.suffix == ".pt":
            # verl's own files: numbers of generators are no tensors, so that torch cannot read weights alone.
            _add(digest, torch.load(file, map_location="cpu", weights_only=False))
        else:
            continue
        found[str(file.relative_to(step))] = digest.hexdigest()
    return found


def _add(digest: Any, value: Any) -> None:
    """Add a value with everything in it, whatever objects hold it."""
    if hasattr(value, "to_local"):  # of a DTensor, this rank's share
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, dict):
        for key in sorted(value.keys() - {_DRAWN}, key=str):
            digest.update(f"{key}:".encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}]".encode())
        for each in value:
            _add(digest, each)
    else:
        digest.update(repr(value).encode())
