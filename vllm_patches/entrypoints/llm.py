"""verl's arguments to the vLLM engine, in the form that vLLM 0.9.1 takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features import settings
from verl_patches.features.compatibility.feature import VERL_ON_VLLM
from verl_patches.features.direct_loading.feature import DIRECT_LOADING
from verl_patches.features.residency.feature import RESIDENCY
from verl_patches.features.rollout_parallel.feature import ROLLOUT_EXPERT_PARALLEL

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM


@wrap(
    "vllm.entrypoints.llm:LLM.__init__",
    feature=VERL_ON_VLLM,
    why="verl 0.4.0 passes multi-modal options for text models too, which vLLM 0.9.1 rejects",
    upstream="https://github.com/verl-project/verl/pull/1880",
    remove_when="verl passes multi-modal options only for multi-modal models",
    evidence="executed",
)
def init(
    upstream: Callable[..., None],
    self: LLM,
    *args: Any,
    limit_mm_per_prompt: dict[str, int] | None = None,
    disable_mm_preprocessor_cache: bool = False,
    **kwargs: Any,
) -> None:
    from verl_patches.features.compatibility.image_models import reads_images

    if limit_mm_per_prompt is not None:
        kwargs["limit_mm_per_prompt"] = limit_mm_per_prompt
    if limit_mm_per_prompt is not None or reads_images(args[0] if args else kwargs.get("model")):
        kwargs["disable_mm_preprocessor_cache"] = disable_mm_preprocessor_cache
    upstream(self, *args, **kwargs)


@wrap(
    "vllm.entrypoints.llm:LLM.__init__",
    feature=RESIDENCY,
    why="verl asks for sleep mode, whose memory pool would own the tensors that residency moves",
    upstream="not forwarded: part of this project's features",
    remove_when="verl moves rollout weights and KV cache without vLLM's sleep mode",
    evidence="executed",
)
def init_without_sleep_mode(upstream: Callable[..., None], self: LLM, *args: Any, **kwargs: Any) -> None:
    upstream(self, *args, **{**kwargs, "enable_sleep_mode": False})


@wrap(
    "vllm.entrypoints.llm:LLM.__init__",
    feature=ROLLOUT_EXPERT_PARALLEL,
    why="verl 0.4.0 gives every tensor-parallel group its own engine, so experts cannot be spread over all dies",
    upstream="https://github.com/verl-project/verl/pull/3530",
    remove_when="verl starts data-parallel rollout engines with expert parallelism",
    evidence="executed",
)
def init_with_expert_parallel(upstream: Callable[..., None], self: LLM, *args: Any, **kwargs: Any) -> None:
    import torch.distributed as dist

    from verl_patches.features.rollout_parallel.engine_environment import (
        EnginePlace,
        check_expert_parallel,
        set_engine_environment,
    )

    expert_parallel = ROLLOUT_EXPERT_PARALLEL.current().expert_parallel_size
    place = EnginePlace(dist.get_rank(), dist.get_world_size(), kwargs.get("tensor_parallel_size", 1), expert_parallel)
    check_expert_parallel(place)
    set_engine_environment(place)
    kwargs["enable_expert_parallel"] = True
    return upstream(self, *args, **kwargs)


@wrap(
    "vllm.entrypoints.llm:LLM.__init__",
    feature=DIRECT_LOADING,
    why="verl starts engines with random weights, which stay until the first reshard, and vLLM's own loaders read "
    "whole tensors",
    upstream="not forwarded: needs this project's sharding specs",
    remove_when="vLLM loads DeepSeek-V3 from FP8 files into bfloat16, each rank reading its own part",
)
def init_with_direct_loading(upstream: Callable[..., None], self: LLM, *args: Any, **kwargs: Any) -> None:
    import torch.distributed as dist

    from post_training.checkpoint.loading import ignored_prefixes, load_from_huggingface
    from post_training.hang_detection.progress import file_progress
    from post_training.layouts.model_tensors import rollout_tensors
    from post_training.layouts.placements import rollout_placement
    from post_training.models.families import table_for
    from post_training.reshard.mla_refresh import refresh_absorbed_weights

    upstream(self, *args, **kwargs)
    folder = settings.current().load_from_hf
    config = self.llm_engine.vllm_config
    model = self.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    table = table_for(config.model_config.hf_config)
    pieces = table.vllm_ascend(rollout_placement(config), dist.get_rank())
    ignored = ignored_prefixes(folder)
    load_from_huggingface(folder, rollout_tensors(model), pieces, table.shapes, ignored, file_progress)
    refresh_absorbed_weights(model)
