"""Patches of verl's sharding manager between FSDP and vLLM: it runs on an NPU, and its time and memory are measured."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.compatibility.feature import VERL_ON_NPU
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.residency.feature import PHASES
from verl_patches.features.watch.feature import WATCH

if TYPE_CHECKING:
    from verl.workers.sharding_manager.fsdp_vllm import FSDPVLLMShardingManager

_MANAGER = "verl.workers.sharding_manager.fsdp_vllm:FSDPVLLMShardingManager"


@wrap(
    f"{_MANAGER}.__init__",
    feature=VERL_ON_NPU,
    why="the cluster's verl checks for CUDA and ends every rollout of FSDP without it; its release asks for the device",
    upstream="https://github.com/verl-project/verl/pull/1858",
    remove_when="the pinned verl has check_device_is_available instead of check_cuda_is_available",
)
def init(upstream: Callable[..., None], self: FSDPVLLMShardingManager, *args: Any, **kwargs: Any) -> None:
    from verl.utils import torch_functional

    if hasattr(torch_functional, "check_cuda_is_available"):
        # The vendor's way to redirect torch.cuda to the NPU, as for FSDP2 and Megatron.
        from torch_npu.contrib import transfer_to_npu  # noqa: F401

    upstream(self, *args, **kwargs)


@wrap(
    f"{_MANAGER}.__enter__",
    feature=MEASURE,
    why="the time of the weight transfer into the rollout is a separate metric",
)
def enter(upstream: Callable[..., None], self: FSDPVLLMShardingManager) -> None:
    from verl_patches.features.measure.step_record import current_record

    with current_record().timed("reshard"):
        upstream(self)


@wrap(
    f"{_MANAGER}.__enter__",
    feature=PHASES,
    why="the memory of the weight transfer into the rollout is measured apart from the rollout's",
    outside=["measure"],
)
def enter_in_phases(upstream: Callable[..., None], self: FSDPVLLMShardingManager) -> None:
    from verl_patches.workers.process_residency import process_residency, sleeping_engine

    process_residency().enter("reshard")
    sleeping_engine().asleep = False
    upstream(self)
    process_residency().enter("rollout")


@wrap(
    f"{_MANAGER}.__exit__",
    feature=PHASES,
    why="the rollout's memory is measured when it ends",
)
def leave(
    upstream: Callable[..., None],
    self: FSDPVLLMShardingManager,
    exc_type: type[BaseException] | None,
    exc_value: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    from verl_patches.workers.process_residency import process_residency, sleeping_engine

    process_residency().close()  # with the engine awake
    upstream(self, exc_type, exc_value, traceback)
    sleeping_engine().asleep = True
    process_residency().enter("idle")


@wrap(
    f"{_MANAGER}.__enter__",
    feature=WATCH,
    why="the weight transfer is inside verl's call for a generation, and has its own limit",
    outside=["phases"],
)
def enter_watched(upstream: Callable[..., None], self: FSDPVLLMShardingManager) -> None:
    from post_training.hang_detection.signs import process_signs

    with process_signs().phase("reshard"):
        return upstream(self)
