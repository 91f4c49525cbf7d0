"""verl's arguments to the vLLM engine, in the form that vLLM 0.9.1 takes."""

from overlay import wrap


@wrap(
    "vllm.entrypoints.llm:LLM.__init__",
    feature="verl_on_vllm_0_9_1",
    why="verl 0.4.0 passes multi-modal options for text models, which vLLM 0.9.1 refuses, and asks for sleep mode",
    upstream="not forwarded: later verl releases pass the options for multi-modal models only",
    remove_when="verl passes multi-modal options for multi-modal models only, and the residency feature is upstream",
    switch="actor_rollout_ref.overlay.residency.enabled",
    evidence="executed",
)
def init(upstream, self, *args, limit_mm_per_prompt=None, disable_mm_preprocessor_cache=False, **kwargs):
    from verl_patches.features import settings

    if limit_mm_per_prompt is not None:
        kwargs["limit_mm_per_prompt"] = limit_mm_per_prompt
        kwargs["disable_mm_preprocessor_cache"] = disable_mm_preprocessor_cache
    if settings.current().residency.enabled:
        kwargs["enable_sleep_mode"] = False
    upstream(self, *args, **kwargs)


@wrap(
    "vllm.entrypoints.llm:LLM.__init__",
    feature="rollout_expert_parallel",
    why="verl 0.4.0 gives every tensor-parallel group an engine of its own, so experts cannot be spread over all dies",
    upstream="not forwarded: later verl releases have an option of their own",
    remove_when="verl starts data-parallel rollout engines with expert parallelism",
    switch="actor_rollout_ref.overlay.rollout.expert_parallel_size",
    evidence="executed",
)
def init_with_expert_parallel(upstream, self, *args, **kwargs):
    from verl_patches.features import settings

    expert_parallel = settings.current().rollout.expert_parallel_size
    if expert_parallel == 1:
        return upstream(self, *args, **kwargs)

    import torch.distributed as dist

    from verl_patches.features.rollout_parallel.engine_environment import (
        EnginePlace,
        check_expert_parallel,
        set_engine_environment,
    )

    place = EnginePlace(dist.get_rank(), dist.get_world_size(), kwargs.get("tensor_parallel_size", 1))
    check_expert_parallel(place, expert_parallel)
    set_engine_environment(place)
    kwargs["enable_expert_parallel"] = True
    return upstream(self, *args, **kwargs)
