"""Loads checkpoints that verl's FSDP2 engine saved on another number of ranks; verl itself requires the same number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from post_training.checkpoint.files import CheckpointError


def ranks_that_saved(folder: Path) -> int | None:
    """Return how many ranks wrote the checkpoint in `folder`; None if verl's FSDP engine did not write it."""
    file = folder / "fsdp_config.json"
    return int(json.loads(file.read_text())["world_size"]) if file.is_file() else None


@dataclass(frozen=True)
class SavedRanks:
    """The files of all ranks that saved. Their contents stay on disk until they are read."""

    folder: Path
    ranks: int

    def open(self, part: str) -> list[Any]:
        """Return each rank's saved `part`: `model`, `optim` or `extra_state`.

        Raises:
            CheckpointError: a rank's file is missing.
        """
        found = []
        for rank in range(self.ranks):
            file = self.folder / f"{part}_world_size_{self.ranks}_rank_{rank}.pt"
            if not file.is_file():
                raise CheckpointError(f"{self.folder} is not complete: {file.name} is missing")
            # These are verl's own files. They hold DTensors, which torch does not load with weights_only=True.
            found.append(torch.load(file, map_location="cpu", weights_only=False, mmap=True))
        return found

    @torch.no_grad()
    def load(self, module: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
        """Load this rank's model, optimizer and schedule, each unless it is None; random states stay as they are."""
        if module is not None:
            models = self.open("model")
            for name, target in module.state_dict().items():
                local = target.to_local() if isinstance(target, DTensor) else target
                local.copy_(_share(name, [saved[name] for saved in models], target))
        if optimizer is not None:
            self._load_optimizer(optimizer)
        if scheduler is not None and (schedule := self.open("extra_state")[0]["lr_scheduler"]) is not None:
            scheduler.load_state_dict(schedule)

    def _load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        optimizers = self.open("optim")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = {
            number: {key: _state(key, [saved["state"][number][key] for saved in optimizers], parameter) for key in keys}
            for number, parameter in enumerate(parameters)
            if (keys := optimizers[0]["state"].get(number, {}))
        }
        optimizer.load_state_dict({"state": states, "param_groups": optimizers[0]["param_groups"]})


def _state(name: str, saved: list[Any], parameter: torch.Tensor) -> Any:
    """Return this rank's share of an optimizer state; one that is no DTensor, like `step`, is the same on each rank."""
    if not isinstance(saved[0], DTensor) or not isinstance(parameter, DTensor):
        return saved[0]
    local = _share(name, saved, parameter).to(parameter.to_local().device)
    placed: Mapping[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False, **placed)


def _share(name: str, saved: list[Any], target: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of a tensor, assembled from the shares of the ranks that saved it."""
    whole = saved[0]
    if isinstance(whole, DTensor):
        placement, *others = whole.placements
        if others or not placement.is_shard():
            raise CheckpointError(f"{name} was saved as {whole.placements}. Resume on as many ranks as saved it")
        whole = torch.cat([each.to_local() for each in saved], dim=placement.dim)
    if whole.shape != target.shape:
        raise CheckpointError(f"{name} has shape {tuple(whole.shape)} in the checkpoint, not {tuple(target.shape)}")
    if not isinstance(target, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    region = tuple(slice(start, start + extent) for start, extent in zip(offset, shape, strict=True))
    return whole[region].clone()
