"""Megatron-core's optimizer whose state and step are the host's (`optimizer_cpu_offload`), as one that can be resumed.

Megatron-core 0.16.1 saves its state and cannot load it: docs/upstream/megatron-core-hybrid-optimizer-resume.md.
It builds both optimizers by the names of their classes, with no way to give others, so `resumable` makes an engine's
own ones instances of these subclasses.
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
# Which kernel updates a tensor is for the place where the tensor is.
_KERNEL = "fused"


class ResumableHybridOptimizer(HybridDeviceOptimizer):
    """Moves the state of what it updates on the die to the die, and knows parameters that are float32 already.

    A parameter is a tensor of its groups, on the die. Its inner tensor is the float32 one that is updated: itself, or
    another one where the host updates it or where it is bfloat16.
    """

    def parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.optim.Optimizer, dict[str, Any]]]:
        """Each parameter with its inner tensor, that tensor's own optimizer, and its group there."""
        for optimizer in self.sub_optimizers:
            for group in optimizer.param_groups:
                for inner in group["params"]:
                    yield self.inner_param_to_orig_param[inner], inner, optimizer, group

    def create_states(self, steps: int) -> None:
        """Begin with averages of zero after `steps` updates. Upstream makes an update with random gradients instead.

        Args:
            steps: updates so far; with none, as after one that changed nothing.
        """
        for _, inner, optimizer, group in self.parts():
            optimizer.state[inner] |= {name: torch.zeros_like(inner) for name in MOMENTS}
            if not counts_in_group(optimizer):
                device = inner.device if group.get(_KERNEL) else "cpu"
                optimizer.state[inner][_STEP] = torch.zeros((), dtype=torch.float32, device=device)
        self.count(steps)
        self._sync_sub_optimizers_state_to_hdo()

    def forget(self) -> None:
        """Begin as a new optimizer does."""
        for optimizer in self.sub_optimizers:
            optimizer.state.clear()
        self._sync_sub_optimizers_state_to_hdo()

    def count(self, steps: int) -> None:
        """Go on as after `steps` updates."""
        for _, inner, optimizer, group in self.parts():
            if counts_in_group(optimizer):
                group[_STEP] = steps
            else:
                optimizer.state[inner][_STEP].fill_(steps)

    @torch.no_grad()
    def show(self) -> None:
        """Write the float32 elements that the host updates to those on the die, as an update does."""
        for parameter, inner, _, _ in self.parts():
            if parameter is not inner and parameter.dtype == inner.dtype:
                parameter.copy_(inner)

    @torch.no_grad()
    def set(self, parameter: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the float32 elements (`param`) and averages of a parameter, where they are."""
        inner, state = self.param_to_inner_param[parameter], self.state[parameter]
        inner.copy_(tensors["param"])
        state[_MASTER] = inner  # verl may have put a copy there
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
    """Megatron-core's distributed optimizer of a hybrid one: it saves no classes, and loads into the tensors in use."""

    optimizer: ResumableHybridOptimizer

    def state_dict(self) -> dict[str, Any]:
        """As upstream, without what says where tensors are: torch reads no classes from a file, and it may change."""
        if not self.optimizer.state:
            self.optimizer.create_states(0)
        found: dict[str, Any] = super().state_dict()
        own = self._of_places()
        for group in found[_OPTIMIZER]["param_groups"]:
            for key in own & group.keys():
                del group[key]
        return found

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Take over what was saved: rates, the count of updates, and tensors where there are any.

        Raises:
            CheckpointError: the tensors were saved in another format, or updates were not counted alike.
        """
        if not self.optimizer.state:
            self.optimizer.create_states(0)
        saved = {_identity(group): group for group in loaded[_OPTIMIZER]["param_groups"]}
        own = self._of_places() | {"params", _STEP}
        for group in self.optimizer.param_groups:
            group.update({key: value for key, value in saved[_identity(group)].items() if key in group.keys() - own})
        counts = {int(group[_STEP]) for group in saved.values()}
        if len(counts) != 1:
            raise CheckpointError(f"the optimizer's weights have had different numbers of updates: {sorted(counts)}")
        self.optimizer.count(counts.pop())
        if self.grad_scaler and "grad_scaler" in loaded:
            self.grad_scaler.load_state_dict(loaded["grad_scaler"])
        if _STATES in loaded:
            if (saved_as := loaded["param_state_sharding_type"]) != _FORMAT:
                raise CheckpointError(
                    f"{ON_HOST}=true loads no optimizer that was saved as {saved_as}; resume with it set to false"
                )
            self.load_parameter_state_from_fully_reshardable(loaded[_STATES])

    def _set_main_param_and_optimizer_states(
        self, model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        group, place = self.model_param_group_index_map[model_param]
        self.optimizer.set(self.optimizer.param_groups[group]["params"][place], tensors)

    def _of_places(self) -> set[str]:
        """Keys of groups that say where and by which kernel tensors are updated."""
        return {*(self.optimizer.defaults.keys() - self.optimizer.sub_optimizer_kwargs.keys()), _KERNEL}

    def shards(self, names: Mapping[int, str]) -> Iterator[OptimizerShard]:
        """What is kept of each weight of this rank.

        Args:
            names: of the model's weights, by `id`.
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


def resumable(optimizer: Any) -> None:
    """Make the optimizers of a chain such that can be resumed, where the host has their state."""
    for part in parts_of(optimizer):
        # An optimizer that is not distributed, or of another project, keeps its own way of loading.
        if type(part) is DistributedOptimizer and type(part.optimizer) is HybridDeviceOptimizer:
            part.__class__, part.optimizer.__class__ = ResumableDistributedOptimizer, ResumableHybridOptimizer


def parts_of(optimizer: Any) -> list[Any]:
    """Megatron-core's optimizers of a chain, or the one that is none."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def hybrid_parts(optimizer: Any) -> list[ResumableDistributedOptimizer]:
    """Those whose state is the host's: all or none."""
    return [part for part in parts_of(optimizer) if isinstance(part, ResumableDistributedOptimizer)]


def classes_in_files(parts: Iterable[ResumableDistributedOptimizer]) -> list[type]:
    """Classes that verl alone saves with such an optimizer, and that torch reads only if they are named to it."""
    return list({value for part in parts for value in part.optimizer.defaults.values() if isinstance(value, type)})


def counts_in_group(optimizer: torch.optim.Optimizer) -> bool:
    """Whether updates are counted in the group, as MindSpeed's and apex's optimizers do, and not with each tensor."""
    return not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """By what Megatron-core finds a group again."""
    return tuple(group[key] for key in param_group_identifier_keys)
