"""vLLM inspects a model's class in its own process if that process already uses the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.compatibility.feature import START_UP

if TYPE_CHECKING:
    from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo


@wrap(
    "vllm.model_executor.models.registry:_LazyRegisteredModel.inspect_model_cls",
    feature=START_UP,
    evidence="executed",
    why="every engine starts a Python process that imports vLLM again (13 s of one core), to leave the device alone; "
    "in verl's worker the device is already in use and the class is loaded a moment later anyway",
    upstream="https://github.com/vllm-project/vllm/pull/23558",
    remove_when="vLLM caches what it learns about a model class between processes",
    relies_on=["vllm.model_executor.models.registry:_ModelInfo.from_model_cls"],
)
def inspect_model_cls(upstream: Callable[..., _ModelInfo], self: _LazyRegisteredModel) -> _ModelInfo:
    import torch

    if not torch.npu.is_initialized():
        return upstream(self)
    from vllm.model_executor.models.registry import _ModelInfo

    return _ModelInfo.from_model_cls(self.load_model_cls())
