"""Replaces this project's plan by the published per-tensor algorithm inside verl's worker processes."""

from typing import Any

from tests.worker_processes.jobs import State


def move_as_published(state: State) -> None:
    """Make the sharding manager move weights by the published algorithm. Phases and everything else stay."""
    from verl_patches.workers.sharding_manager import megatron_vllm

    state["plan"] = megatron_vllm._run_plan
    megatron_vllm._run_plan = _run_published


def move_by_plan(state: State) -> None:
    """Undo `move_as_published`."""
    from verl_patches.workers.sharding_manager import megatron_vllm

    megatron_vllm._run_plan = state.pop("plan")


def _run_published(manager: Any) -> None:
    from verl.utils.vllm_utils import patch_vllm_moe_model_weight_loader

    from benchmarks.published_path import PublishedPath
    from post_training.layouts.model_tensors import train_tensors
    from post_training.layouts.placements import rollout_placement, train_placement
    from post_training.models.deepseek_v3 import DeepseekV3Shape

    engine = manager.inference_engine.llm_engine
    model = engine.model_executor.driver_worker.worker.model_runner.get_model()
    patch_vllm_moe_model_weight_loader(model)  # loading has taken the experts' loaders away
    PublishedPath(
        train_tensors(manager.actor_module),
        DeepseekV3Shape.from_config(manager.model_config),
        train_placement(manager.transformer_config),
        rollout_placement(engine.vllm_config),
        model,
    ).run()
