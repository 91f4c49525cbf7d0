"""Patches of verl's sharding manager between Megatron and vLLM: reshard, then generate, each with only its tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.reshard.feature import RESHARD, WHOLE_WEIGHTS
from verl_patches.features.residency.feature import PHASES
from verl_patches.features.watch.feature import WATCH

if TYPE_CHECKING:
    from torch import nn
    from verl.workers.sharding_manager.megatron_vllm import MegatronVLLMShardingManager

    from post_training.reshard.resharder import Resharder

_MANAGER = "verl.workers.sharding_manager.megatron_vllm:MegatronVLLMShardingManager"
_OURS = "not forwarded: part of this project's features"


@wrap(
    f"{_MANAGER}.__enter__",
    feature=RESHARD,
    evidence="executed",
    why="verl gathers every tensor whole on every rank; a plan of byte ranges moves only the weights that a rank "
    "serves",
    upstream=_OURS,
    remove_when="verl reshards Megatron experts by point-to-point transfer",
)
def enter(upstream: Callable[..., None], self: MegatronVLLMShardingManager) -> None:
    _run_plan(self)


@wrap(
    f"{_MANAGER}.__enter__",
    feature=WHOLE_WEIGHTS,
    evidence="executed",
    why="weights that MLA derives from others go stale with every way of resharding, and a reshard that fails "
    "half-way leaves a mixture of old and new ones",
    upstream=_OURS,
    remove_when="verl refreshes derived weights and refuses to generate after a failed weight transfer",
    outside=["reshard"],
)
def enter_whole(upstream: Callable[..., None], self: MegatronVLLMShardingManager) -> None:
    from post_training.reshard.mla_refresh import refresh_absorbed_weights
    from verl_patches.features.reshard.generation import process_generation

    with process_generation().writing():
        upstream(self)
        refresh_absorbed_weights(_rollout_model(self))


@wrap(
    f"{_MANAGER}.__enter__",
    feature=MEASURE,
    evidence="executed",
    why="a step's report has the time of resharding and whether the rollout's weights equal training's",
    outside=["whole_weights"],
)
def enter_measured(upstream: Callable[..., None], self: MegatronVLLMShardingManager) -> None:
    from verl_patches.features.measure.step_record import current_record

    with current_record().timed("reshard"):
        upstream(self)
    if MEASURE.current().verify_weights:
        current_record().count("reshard/weights_differing", len(_resharder(self).verify()))


@wrap(
    f"{_MANAGER}.__enter__",
    feature=PHASES,
    evidence="executed",
    why="training weights are read and rollout weights written, and afterwards only the rollout is needed",
    upstream=_OURS,
    remove_when="verl moves rollout weights and KV cache without vLLM's sleep mode",
    outside=["measure"],
)
def enter_in_phases(upstream: Callable[..., None], self: MegatronVLLMShardingManager) -> None:
    from verl_patches.workers.process_residency import process_residency

    process_residency().enter("reshard")
    upstream(self)
    process_residency().enter("rollout")


@wrap(
    f"{_MANAGER}.__exit__",
    feature=PHASES,
    evidence="executed",
    why="KV cache and rollout weights leave the device before training's state comes back",
    upstream=_OURS,
    remove_when="verl moves rollout weights and KV cache without vLLM's sleep mode",
)
def leave(
    upstream: Callable[..., None],
    self: MegatronVLLMShardingManager,
    exc_type: type[BaseException] | None,
    exc_value: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    from verl_patches.workers.process_residency import process_residency

    # Upstream resets the prefix cache here, through vLLM's sleep, whether or not that sleeps.
    upstream(self, exc_type, exc_value, traceback)
    process_residency().enter("idle")


@wrap(
    f"{_MANAGER}.__enter__",
    feature=WATCH,
    evidence="executed",
    why="resharding is inside verl's call for a generation, and has its own limit",
    outside=["phases"],
)
def enter_watched(upstream: Callable[..., None], self: MegatronVLLMShardingManager) -> None:
    from post_training.hang_detection.signs import process_signs

    with process_signs().phase("reshard"):
        return upstream(self)


def _run_plan(manager: MegatronVLLMShardingManager) -> None:
    from verl_patches.features.measure.step_record import current_record

    report, record = _resharder(manager).run(), current_record()
    # The first run of a process also plans. If that counted, the step after a resume would differ from the unbroken
    # run's.
    record.count("collectives/all_to_all/count", report.collectives - report.object_collectives)
    record.count("collectives/all_to_all/bytes", report.bytes_sent)
    record.count("reshard/bytes_received", report.bytes_received)
    record.count("reshard/expert_bytes_received", report.expert_bytes_received)
    record.count("reshard/values_changed_by_casts", report.values_changed_by_casts)


def _resharder(manager: MegatronVLLMShardingManager) -> Resharder:
    """Return the manager's resharder, made at first use, when both models exist."""
    if not hasattr(manager, "overlay_resharder"):
        import torch.distributed as dist

        from post_training.hang_detection.signs import process_signs
        from post_training.layouts.placements import rollout_placement, train_placement
        from post_training.reshard.resharder import resharder_for

        chosen = RESHARD.current()
        manager.overlay_resharder = resharder_for(
            manager.model_config,
            manager.actor_module,
            _rollout_model(manager),
            train_placement(manager.transformer_config),
            rollout_placement(manager.inference_engine.llm_engine.vllm_config),
            dist.group.WORLD,
            chosen.bucket_bytes,
            chosen.overlap,
            chosen.dies_per_node or None,
            lambda: process_signs().progress(),
        )
    return manager.overlay_resharder


def _rollout_model(manager: MegatronVLLMShardingManager) -> nn.Module:
    return manager.inference_engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
