"""Loads checkpoints that Megatron-core 0.16 saved and cannot load.

Experts that lie on several ranks have an optimizer of their own, chained to that of all other weights; on one rank one
optimizer has both. Megatron-core loads the averages under any layout, but the groups of parameters only with the same
number of optimizers.

If neither apex nor TransformerEngine provides the optimizer, torch's AdamW counts updates for each weight, and
Megatron-core cannot load it at all: it reads that count from the optimizer that is about to be loaded, and ends with an
AssertionError if that has made no update; it looks for the count among the tensors that were saved, and ends with a
KeyError; and it gives all weights one and the same tensor to count in, which rises by their number at each update
(docs/upstream/megatron-core-torch-adam-resume.md).

Without the optimizer among `checkpoint.load_contents`, verl leaves the optimizer's float32 copies of the weights as
they were, and the next update would start from those (docs/upstream/verl-load-contents-megatron.md).

MindSpeed core_r0.16.0 replaces the distributed optimizer's `load_state_dict` by one that does not know the format that
loads under any layout, and ends with "Unknown sharding_type: fully_reshardable". So tensors in that format are loaded
here, as Megatron-core does, after everything else (docs/upstream/mindspeed-fully-reshardable.md).

For the optimizer on the host see `verl_plugin.resume.hybrid_optimizer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

from verl_plugin.resume.hybrid_optimizer import classes_in_files, hybrid_parts
from verl_plugin.resume.loading import AnyLayoutManager

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_OPTIMIZER, _EXPERTS, _STEP = "optimizer", "is_expert_parallel", "step"
_TENSORS, _KIND, _ANY_LAYOUT = "param_state", "param_state_sharding_type", "fully_reshardable"


class MegatronManager(AnyLayoutManager):
    """verl's checkpoint manager for Megatron-core."""

    def load_checkpoint(self, local_path: str, **named: Any) -> None:
        """Load as upstream does, an optimizer on the host included.

        Raises:
            CheckpointError: as `AnyLayoutManager`.
        """
        on_host = hybrid_parts(self._manager.optimizer)
        with torch.serialization.safe_globals(classes_in_files(on_host)):
            super().load_checkpoint(local_path, **named)
        for part in on_host:
            part.optimizer.copy_to_die()

    @property
    def should_load_schedule(self) -> bool:
        """As `AnyLayoutManager`; verl saves Megatron's schedule beside the optimizer."""
        return bool(self._manager.should_load_optimizer)

    def _load_own(self, local_path: str, **named: Any) -> None:
        manager = self._manager
        chain = manager.optimizer
        contents = manager.checkpoint_load_contents
        if _places(local_path) != tuple(getattr(manager.transformer_config, size) for size in _SIZES):
            # Megatron-core saves random states by tensor and pipeline rank, and has none for other sizes.
            manager.checkpoint_load_contents = [each for each in contents if each != "extra"]
        manager.optimizer = AnyChain(chain)
        try:
            if not manager.should_load_optimizer:
                super()._load_own(local_path, **named)
                self._follow_weights()
            elif HAVE_APEX_OR_TE or hybrid_parts(chain):
                super()._load_own(local_path, **named)
            else:
                self._load_counts(chain.chained_optimizers, local_path, **named)
        finally:
            manager.optimizer = chain
            manager.checkpoint_load_contents = contents

    @torch.no_grad()
    def _follow_weights(self) -> None:
        """Set the optimizer's float32 elements to the weights."""
        rank = self._rank()
        for shard in rank.optimizer_shards:
            shard.master.copy_(rank.tensors[shard.local].view(-1)[shard.start : shard.stop])

    def _load_counts(self, parts: Sequence[Any], local_path: str, **named: Any) -> None:
        """Load optimizers that count updates for each weight."""
        self._rank().create_states(1)
        for part in parts:
            part._set_main_param_and_optimizer_states = partial(_set_states, part)
        try:
            super()._load_own(local_path, **named)
        finally:
            for part in parts:
                del part._set_main_param_and_optimizer_states
        for part in parts:
            for state in part.optimizer.state.values():
                state[_STEP] = state[_STEP].clone()


def _places(local_path: str) -> tuple[int, ...]:
    """Return the tensor and pipeline parallel sizes of a saved checkpoint; empty if it has no random states."""
    file = Path(local_path, "transformer_config.json")
    if not file.is_file():
        return ()
    saved = json.loads(file.read_text())
    return tuple(saved[size] for size in _SIZES)


def _set_states(part: Any, parameter: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set a parameter's saved tensors as Megatron-core does, with the count that the optimizer already has."""
    group, place = part.model_param_group_index_map[parameter]
    state = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
    type(part)._set_main_param_and_optimizer_states(part, parameter, {**tensors, _STEP: state[_STEP]})


class AnyChain:
    """Megatron-core's chain of optimizers, which also loads the states of a chain of another length.

    Args:
        chain: a `ChainedOptimizer` of one optimizer or of two.
    """

    def __init__(self, chain: Any) -> None:
        self._chain = chain

    def load_state_dict(self, loaded: dict[Any, Any]) -> None:
        """As upstream.

        Args:
            loaded: the tensors that this chain asked for, merged with everything else that was saved: by number if
                several optimizers saved it, at the top level if one did.
        """
        parts, numbers = self._chain.chained_optimizers, [key for key in loaded if isinstance(key, int)]
        if len(parts) == 1 and numbers:
            tensors = {key: value for key, value in loaded.items() if key not in numbers}
            loaded = loaded[0] | tensors
        elif len(parts) > 1 and _OPTIMIZER in loaded:
            common = {key: value for key, value in loaded.items() if key not in numbers and key != _TENSORS}
            loaded = {number: loaded[number] | common | _groups(part, common) for number, part in enumerate(parts)}
        states = [loaded] if len(parts) == 1 else [loaded[number] for number in range(len(parts))]
        rest = [_without_tensors(state) for state in states]
        self._chain.load_state_dict(rest[0] if len(parts) == 1 else dict(enumerate(rest)))
        for part, state in zip(parts, states, strict=True):
            if _in_any_layout(state):
                part.load_parameter_state_from_fully_reshardable(state[_TENSORS])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chain, name)


def _in_any_layout(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state has tensors in the format that loads under any layout."""
    return _TENSORS in state and state.get(_KIND) == _ANY_LAYOUT


def _without_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state without tensors in that format."""
    return {key: value for key, value in state.items() if key != _TENSORS or not _in_any_layout(state)}


def _groups(part: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameter groups of one optimizer over all weights, as one of several optimizers takes them."""
    experts = part.optimizer.param_groups[0][_EXPERTS]
    saved = common[_OPTIMIZER]
    return {_OPTIMIZER: saved | {"param_groups": [group | {_EXPERTS: experts} for group in saved["param_groups"]]}}
