"""Resumes Megatron-core's optimizer on the host (`optimizer_cpu_offload`).

Megatron-core 0.16.1 saves its state and cannot load it: docs/upstream/megatron-core-hybrid-optimizer-resume.md.
It builds both optimizers by the names of their classes and takes no others, so `make_resumable` turns an engine's
optimizers into instances of these subclasses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.optimizer_shards import OptimizerShard
from post_training.checkpoint.training_files import MOMENTS
from verl_plugin.resume.checks import ON_HOST

_FORMAT = "fully_reshardable"
_OPTIMIZER, _STATES, _STEP, _MASTER = "optimizer", "param_state", "step", "master_param"
# A group's choice of kernel is valid only for the device that it was saved on.
_KERNEL = "fused"


class ResumableHybridOptimizer(HybridDeviceOptimizer):
    """Keeps each state on the device that updates it, and loads parameters that are float32 already.

    A parameter is a tensor of its groups, on the die. Its inner tensor is the float32 one that is updated: the
    parameter itself, or a copy if the host updates it or if it is bfloat16.
    """

    def parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.optim.Optimizer, dict[str, Any]]]:
        """Yield each parameter with its inner tensor, and with that tensor's optimizer and group."""
        for optimizer in self.sub_optimizers:
            for group in optimizer.param_groups:
                for inner in group["params"]:
                    yield self.inner_param_to_orig_param[inner], inner, optimizer, group

    def create_states(self, steps: int) -> None:
        """Create averages of zero and count `steps` updates so far.

        Upstream creates the states by an update with random gradients instead.
        """
        for _, inner, optimizer, group in self.parts():
            optimizer.state[inner] |= {name: torch.zeros_like(inner) for name in MOMENTS}
            if not counts_in_group(optimizer):
                device = inner.device if group.get(_KERNEL) else "cpu"
                optimizer.state[inner][_STEP] = torch.zeros((), dtype=torch.float32, device=device)
        self.set_steps(steps)
        self._sync_sub_optimizers_state_to_hdo()

    def clear_states(self) -> None:
        """Return to the state of a new optimizer."""
        for optimizer in self.sub_optimizers:
            optimizer.state.clear()
        self._sync_sub_optimizers_state_to_hdo()

    def set_steps(self, steps: int) -> None:
        """Set the number of updates so far."""
        for _, inner, optimizer, group in self.parts():
            if counts_in_group(optimizer):
                group[_STEP] = steps
            else:
                optimizer.state[inner][_STEP].fill_(steps)

    @torch.no_grad()
    def copy_to_die(self) -> None:
        """Copy the float32 parameters that the host updates to the die, as an update does."""
        for parameter, inner, _, _ in self.parts():
            if parameter is not inner and parameter.dtype == inner.dtype:
                parameter.copy_(inner)

    @torch.no_grad()
    def load_parameter(self, parameter: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the float32 elements (`param`) and averages of a parameter into the tensors in use."""
        inner, state = self.param_to_inner_param[parameter], self.state[parameter]
        inner.copy_(tensors["param"])
        state[_MASTER] = inner  # verl may have replaced it by a copy
        for name in MOMENTS:
            state[name].copy_(tensors[name])

    def _update_fp32_params_by_new_state(self) -> None:
        for parameter, inner in self.param_to_fp32_param.items():
            if parameter in self.state:
                inner.data.copy_(self.state[parameter][_MASTER])

    def _move_new_state_to_right_device(self) -> None:
        for optimizer in self.sub_optimizers:
            device = "cuda" if optimizer is self.gpu_optimizer else "cpu"
            for inner, state in optimizer.state.items():
                moved = {key: each.to(device) for key, each in state.items() if isinstance(each, torch.Tensor)}
                state.update(moved)
                self.state[self.inner_param_to_orig_param[inner]].update(moved)


class ResumableDistributedOptimizer(DistributedOptimizer):
    """Megatron-core's distributed optimizer around a hybrid one. It saves no classes and loads into tensors in use."""

    optimizer: ResumableHybridOptimizer

    def state_dict(self) -> dict[str, Any]:
        """As upstream, without placement keys: torch reads no classes from a file, and the placement may change."""
        if not self.optimizer.state:
            self.optimizer.create_states(0)
        found: dict[str, Any] = super().state_dict()
        own = self._placement_keys()
        for group in found[_OPTIMIZER]["param_groups"]:
            for key in own & group.keys():
                del group[key]
        return found

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Load learning rates, the number of updates, and tensors if any were saved.

        Raises:
            CheckpointError: the tensors were saved in another format, or weights have different numbers of updates.
        """
        if not self.optimizer.state:
            self.optimizer.create_states(0)
        saved = {_identity(group): group for group in loaded[_OPTIMIZER]["param_groups"]}
        own = self._placement_keys() | {"params", _STEP}
        for group in self.optimizer.param_groups:
            group.update({key: value for key, value in saved[_identity(group)].items() if key in group.keys() - own})
        counts = {int(group[_STEP]) for group in saved.values()}
        if len(counts) != 1:
            raise CheckpointError(f"the optimizer's weights have had different numbers of updates: {sorted(counts)}")
        self.optimizer.set_steps(counts.pop())
        if self.grad_scaler and "grad_scaler" in loaded:
            self.grad_scaler.load_state_dict(loaded["grad_scaler"])
        if _STATES in loaded:
            if (saved_as := loaded["param_state_sharding_type"]) != _FORMAT:
                raise CheckpointError(
                    f"{ON_HOST}=true cannot load an optimizer that was saved as {saved_as}. Set it to false"
                )
            self.load_parameter_state_from_fully_reshardable(loaded[_STATES])

    def _set_main_param_and_optimizer_states(
        self, model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        group, place = self.model_param_group_index_map[model_param]
        self.optimizer.load_parameter(self.optimizer.param_groups[group]["params"][place], tensors)

    def _placement_keys(self) -> set[str]:
        """Return the keys of groups that say on which device and by which kernel tensors are updated."""
        return {*(self.optimizer.defaults.keys() - self.optimizer.sub_optimizer_kwargs.keys()), _KERNEL}

    def shards(self, names: Mapping[int, str]) -> Iterator[OptimizerShard]:
        """Yield the optimizer's shard of each weight of this rank.

        Args:
            names: names of the model's weights, by `id` of the weight.
        """
        parts = {id(part[0]): part for part in self.optimizer.parts()}
        for weight, (group, place) in self.model_param_group_index_map.items():
            parameter = self.optimizer.param_groups[group]["params"][place]
            _, inner, optimizer, inner_group = parts[id(parameter)]
            interval = self._get_model_param_range_map(weight)["param"]
            yield OptimizerShard(
                names[id(weight)],
                tuple(weight.shape),
                interval.start,
                interval.end,
                inner,
                optimizer.state[inner],
                inner_group,
                counts_in_group(optimizer),
            )


def make_resumable(optimizer: Any) -> None:
    """Make a chain's optimizers on the host resumable."""
    for part in _chained(optimizer):
        # An optimizer that is not distributed, or another project's, keeps its own way of loading.
        if type(part) is DistributedOptimizer and type(part.optimizer) is HybridDeviceOptimizer:
            part.__class__, part.optimizer.__class__ = ResumableDistributedOptimizer, ResumableHybridOptimizer


def _chained(optimizer: Any) -> list[Any]:
    """Return the optimizers of Megatron-core's chain, or the only one if it is not chained."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def hybrid_parts(optimizer: Any) -> list[ResumableDistributedOptimizer]:
    """Return a chain's optimizers on the host: all of them or none."""
    return [part for part in _chained(optimizer) if isinstance(part, ResumableDistributedOptimizer)]


def classes_in_files(parts: Iterable[ResumableDistributedOptimizer]) -> list[type]:
    """Return the classes in files that verl wrote without this module: torch reads only classes that it is told."""
    return list({value for part in parts for value in part.optimizer.defaults.values() if isinstance(value, type)})


def counts_in_group(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer counts updates in its groups, like MindSpeed's and apex's, and not per tensor."""
    return not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values by which Megatron-core recognises a group."""
    return tuple(group[key] for key in param_group_identifier_keys)
