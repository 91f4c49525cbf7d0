"""Groups of keys of the rollout and of vLLM's engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from verl_patches.trainer.configuration_checks.schema.values import (
    LARGEST,
    SEE,
    Count,
    CountOrNone,
    KeyGroup,
    Name,
    NotNegative,
    PositiveFraction,
    Seed,
    Whole,
)

TopK = Annotated[int, Field(ge=-1, le=LARGEST, description="set it to a number of tokens, or -1 for all of them")]


class LayerNames(KeyGroup):
    qkv_layer_name: Name
    gate_proj_layer_name: Name


class TorchairGraph(KeyGroup):
    enabled: bool = False
    use_cached_graph: bool = False
    use_cached_kv_cache_bytes: bool = False
    graph_batch_sizes: list[Count] = []
    graph_batch_sizes_init: bool = False
    enable_multistream_mla: bool = False
    enable_multistream_moe: bool = False
    enable_view_optimize: bool = True
    enable_kv_nz: bool = False
    enable_super_kernel: bool = False


class AscendScheduler(KeyGroup):
    enabled: bool = False
    enable_chunked_prefill: bool = False
    policy: Literal["fcfs"] = "fcfs"
    max_num_batched_tokens: CountOrNone = None
    max_num_seqs: CountOrNone = None
    max_model_len: CountOrNone = None
    max_num_partial_prefills: CountOrNone = None
    max_long_partial_prefills: CountOrNone = None
    long_prefill_token_threshold: Whole | None = None


class AdditionalConfig(KeyGroup):
    """vLLM-Ascend's own options."""

    refresh: bool = False
    torchair_graph_config: TorchairGraph | None = None
    ascend_scheduler_config: AscendScheduler | None = None
    expert_map_path: None = Field(default=None, description="resharding does not know where such a map puts experts")
    dynamic_eplb: Literal[False] = Field(default=False, description="resharding does not know where it puts experts")
    num_iterations_eplb_update: Count = 400
    gate_eplb: bool = False
    num_wait_worker_iterations: Count = 30
    chunked_prefill_for_mla: bool = False
    enable_weight_nz_layout: bool = False
    enable_prefill_optimizations: bool = False
    enable_cpu_binding: bool = False
    lmhead_tp_size: Annotated[int, Field(ge=-1)] = -1


class VllmOptions(KeyGroup):
    """Arguments of vLLM's engine; `handed_over` checks further ones against the engine's own names."""

    model_config = ConfigDict(extra="allow")

    swap_space: NotNegative | None = None
    max_num_seqs: CountOrNone = None
    num_gpu_blocks_override: CountOrNone = None
    block_size: CountOrNone = None
    additional_config: AdditionalConfig | None = None


class EngineOptions(KeyGroup):
    vllm: VllmOptions
    sglang: dict[str, None] = Field({}, description="vLLM-Ascend is the only rollout that the overlay patches")


class ValidationSampling(KeyGroup):
    top_k: TopK
    top_p: PositiveFraction
    temperature: NotNegative
    n: Count
    do_sample: bool


class MultiTurn(KeyGroup):
    enable: Literal[False] = Field(description=f"tools need SGLang, which the overlay does not patch; {SEE}")
    max_turns: CountOrNone
    tool_config_path: None = Field(description=f"no turn calls a tool; {SEE}")
    format: Name


class Generation(KeyGroup):
    """Rollout keys that Megatron and FSDP share."""

    name: Literal["vllm"] = Field(description=f"vLLM-Ascend is the only rollout that the overlay patches; {SEE}")
    mode: Literal["sync"] = Field(description=f"asynchronous rollouts are not supported; {SEE}")
    temperature: NotNegative
    top_k: TopK
    top_p: PositiveFraction
    prompt_length: Count
    response_length: Count
    dtype: Literal["bfloat16", "float32"]
    gpu_memory_utilization: PositiveFraction
    ignore_eos: bool
    enforce_eager: bool
    free_cache_engine: bool
    load_format: Literal["dummy_megatron", "dummy_hf", "dummy_dtensor", "dummy", "auto", "safetensors", "pt"]
    tensor_model_parallel_size: Count
    max_num_batched_tokens: Count
    max_model_len: CountOrNone
    max_num_seqs: Count
    log_prob_micro_batch_size: None = Field(description="set log_prob_micro_batch_size_per_gpu, which replaces it")
    log_prob_micro_batch_size_per_gpu: CountOrNone
    disable_log_stats: bool
    enable_chunked_prefill: bool
    do_sample: bool
    n: Count
    engine_kwargs: EngineOptions
    val_kwargs: ValidationSampling
    multi_turn: MultiTurn
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: Count = 16384
    seed: Seed | None = None
    stop_token_ids: list[Whole] | None = Field(
        default=None, description="set it to ids of further tokens that end an answer"
    )
    limit_images: CountOrNone = None


class Rollout(Generation):
    layer_name_map: LayerNames
