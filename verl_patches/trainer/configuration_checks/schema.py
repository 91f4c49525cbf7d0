"""The keys of verl's PPO configuration for Megatron with this overlay: type and range of each, as typed groups.

Those for FSDP are in `fsdp_schema`, over the groups that both have.

One class is one group of keys; a field without a default is a key that verl reads without asking whether it is there.
Fields with a default are keys that verl reads with `get`, or that only one of the two supported releases has. What verl
hands on whole is open here and checked where its reader is known: `vllm` and `override_transformer_config` in
`handed_over`, `overlay` in the settings of the features. `description` is the remedy where the range alone does not say
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

_LARGEST = 2**31 - 1

Count = Annotated[int, Field(ge=1, le=_LARGEST)]
CountOrNone = Count | None
Whole = Annotated[int, Field(ge=0, le=_LARGEST)]
Seed = Annotated[int, Field(ge=0, le=_LARGEST)]
Frequency = Annotated[int, Field(ge=-1, le=_LARGEST, description="give a number of steps, or -1 for never")]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
Listed = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Files = Annotated[list[Name], Listed, Field(min_length=1)]
# verl's own file says None where it means null, which YAML reads as a word.
NoneAsWord = BeforeValidator(lambda value: None if value == "None" else value)

RateSchedule = Literal["constant", "linear", "cosine"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlEstimator = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
Backend = Literal["console", "tensorboard", "wandb", "tracking", "mlflow", "swanlab", "vemlp_wandb", "clearml"]

_MEGATRON = "this configuration trains with Megatron; for FSDP choose one that has actor_rollout_ref.actor.fsdp_config"
PAGE = "docs/not-supported.md"
SEE = f"{PAGE} says what to use"
_KEPT = "the checkpoint that a run goes on from is kept until a newer one is complete; set it to false"
_NO_HDFS = "checkpoints are written to trainer.default_local_dir alone; take it away"


class Group(BaseModel):
    """A group of keys in which every key is known and nothing is converted: "3" is no number, and NaN is none."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class CustomClass(Group):
    path: Name | None
    name: Name | None


class Data(Group):
    tokenizer: Name | None
    train_files: Files
    val_files: Files
    prompt_key: Name
    reward_fn_key: Name
    max_prompt_length: Count
    max_response_length: Count
    train_batch_size: Count
    val_batch_size: CountOrNone
    return_raw_input_ids: bool
    return_raw_chat: bool
    return_full_prompt: bool
    shuffle: bool
    filter_overlong_prompts: bool
    filter_overlong_prompts_workers: Count
    truncation: Literal["error", "left", "right", "middle"]
    custom_cls: CustomClass
    trust_remote_code: bool = False
    seed: Seed = 1
    dataloader_num_workers: Whole = 8
    gen_batch_size: CountOrNone = None
    cache_dir: Name = "~/.cache/verl/rlhf"
    chat_template_func: Name | None = None
    filter_prompts: bool = True
    image_key: Name = "images"
    video_key: Name = "videos"
    need_tools_kwargs: bool = False
    use_shm: bool = False


class ExpertOverrides(Group):
    freeze_moe_router: bool = False
    fix_moe_router: bool = False


class ModelOverrides(Group):
    hf_config: dict[str, Any] = Field(alias="model_config")
    moe_config: ExpertOverrides


class Recomputation(Group):
    activations_checkpoint_method: Literal["uniform", "block"] | None
    activations_checkpoint_granularity: Literal["selective", "full"] | None
    activations_checkpoint_num_layers: CountOrNone


class TrainedModel(Group):
    path: str | None
    external_lib: Name | None
    override_config: ModelOverrides
    enable_gradient_checkpointing: bool
    gradient_checkpointing_kwargs: Recomputation
    trust_remote_code: bool = False
    use_shm: bool = False


class CriticModel(TrainedModel):
    tokenizer_path: str | None


class Optim(Group):
    lr: NotNegative
    clip_grad: NotNegative
    lr_warmup_steps_ratio: Fraction
    min_lr_ratio: Fraction | None
    warmup_style: RateSchedule
    total_training_steps: Annotated[int, Field(ge=-1, le=_LARGEST)]
    weight_decay: NotNegative
    lr_warmup_steps: Annotated[int, Field(ge=-1, le=_LARGEST)] = -1


class TransformerOptions(Group):
    """Fields of Megatron's configuration of the model; further ones are held against its own names."""

    model_config = ConfigDict(extra="allow")

    num_layer_list: list[Count] | None = None
    moe_tp_extend_ep: bool = False


class Megatron(Group):
    param_offload: bool
    tensor_model_parallel_size: Count
    expert_model_parallel_size: Count
    expert_tensor_parallel_size: Annotated[CountOrNone, NoneAsWord]
    pipeline_model_parallel_size: Count
    virtual_pipeline_model_parallel_size: CountOrNone
    context_parallel_size: Literal[1] = Field(
        description="the attention of these models on Megatron-core 0.8.0 needs whole sequences; raise "
        f"tensor_model_parallel_size instead ({PAGE})"
    )
    sequence_parallel: bool
    use_distributed_optimizer: bool
    use_dist_checkpointing: bool
    dist_checkpointing_path: Name | None
    seed: Seed
    override_transformer_config: TransformerOptions


class TrainedMegatron(Megatron):
    grad_offload: bool
    optimizer_offload: bool


class ActorMegatron(TrainedMegatron):
    load_from_hf: str | None = None


class Profile(Group):
    use_profile: Literal[False] = Field(description="verl's profiler records CUDA only, nothing of an NPU")
    profile_ranks: list[Whole] | None
    step_start: Annotated[int, Field(ge=-1)]
    step_end: Annotated[int, Field(ge=-1)]
    save_path: Name | None


class SavedContents(Group):
    contents: list[Literal["model", "optimizer", "extra", "hf_model"]]


class PolicyUpdate(Group):
    """What Megatron and FSDP have of an actor."""

    ppo_mini_batch_size: Count
    ppo_micro_batch_size: None = Field(description="set ppo_micro_batch_size_per_gpu, which replaces it")
    ppo_micro_batch_size_per_gpu: CountOrNone
    use_dynamic_bsz: bool
    use_torch_compile: bool
    clip_ratio: NotNegative
    clip_ratio_low: Fraction | None
    clip_ratio_high: NotNegative | None
    clip_ratio_c: Annotated[float, Field(gt=1)]
    loss_agg_mode: Aggregation
    entropy_coeff: float
    use_kl_loss: bool
    kl_loss_coef: NotNegative
    kl_loss_type: KlEstimator
    ppo_epochs: Count
    shuffle: bool
    checkpoint: SavedContents
    recompute_old_log_prob: bool = True
    ppo_max_token_len_per_gpu: Count = 16384


class Actor(PolicyUpdate):
    strategy: Literal["megatron"] = Field(description=_MEGATRON)
    data_loader_seed: Seed | None
    optim: Optim
    megatron: ActorMegatron
    profile: Profile
    load_weight: bool


class LogProbs(Group):
    """What Megatron and FSDP have of a reference policy."""

    use_torch_compile: bool
    log_prob_micro_batch_size: None = Field(description="set log_prob_micro_batch_size_per_gpu, which replaces it")
    log_prob_micro_batch_size_per_gpu: CountOrNone
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: Count = 16384


class Reference(LogProbs):
    strategy: Literal["megatron"] = Field(description=_MEGATRON)
    megatron: Megatron
    profile: Profile
    load_weight: bool


TopK = Annotated[int, Field(ge=-1, le=_LARGEST, description="give a number of tokens, or -1 for all of them")]


class LayerNames(Group):
    qkv_layer_name: Name
    gate_proj_layer_name: Name


class TorchairGraph(Group):
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


class AscendScheduler(Group):
    enabled: bool = False
    enable_chunked_prefill: bool = False
    policy: Literal["fcfs"] = "fcfs"
    max_num_batched_tokens: CountOrNone = None
    max_num_seqs: CountOrNone = None
    max_model_len: CountOrNone = None
    max_num_partial_prefills: CountOrNone = None
    max_long_partial_prefills: CountOrNone = None
    long_prefill_token_threshold: Whole | None = None


class AdditionalConfig(Group):
    """vLLM-Ascend's own."""

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


class VllmOptions(Group):
    """Arguments of vLLM's engine; further ones are held against the engine's own names."""

    model_config = ConfigDict(extra="allow")

    swap_space: NotNegative | None = None
    max_num_seqs: CountOrNone = None
    num_gpu_blocks_override: CountOrNone = None
    block_size: CountOrNone = None
    additional_config: AdditionalConfig | None = None


class EngineOptions(Group):
    vllm: VllmOptions
    sglang: dict[str, None] = Field({}, description="vLLM-Ascend is the only rollout that the overlay patches")


class ValidationSampling(Group):
    top_k: TopK
    top_p: PositiveFraction
    temperature: NotNegative
    n: Count
    do_sample: bool


class MultiTurn(Group):
    enable: Literal[False] = Field(description=f"tools need SGLang, which the overlay does not patch; {SEE}")
    max_turns: CountOrNone
    tool_config_path: None = Field(description=f"no turn calls a tool; {SEE}")
    format: Name


class Generation(Group):
    """What both have of a rollout."""

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
        default=None, description="give the ids of further tokens that end an answer"
    )
    limit_images: CountOrNone = None


class Rollout(Generation):
    layer_name_map: LayerNames


SHARED = f"training and rollout share their dies; {SEE}"


class ActorRolloutRef(Group):
    hybrid_engine: Literal[True] = Field(description=SHARED)
    model: TrainedModel
    actor: Actor
    ref: Reference
    rollout: Rollout
    overlay: dict[str, Any]


class KlControl(Group):
    type: Literal["fixed", "adaptive"]
    kl_coef: NotNegative
    horizon: Count = 10000
    target_kl: Annotated[float, Field(gt=0)] = 0.1


class ValueUpdate(Group):
    """What Megatron and FSDP have of a critic."""

    rollout_n: Count
    ppo_mini_batch_size: Count
    ppo_micro_batch_size: None = Field(description="set ppo_micro_batch_size_per_gpu, which replaces it")
    ppo_micro_batch_size_per_gpu: CountOrNone
    use_dynamic_bsz: bool
    ppo_epochs: Count
    shuffle: bool
    cliprange_value: NotNegative
    loss_agg_mode: Aggregation
    checkpoint: SavedContents
    ppo_max_token_len_per_gpu: Count = 32768
    forward_max_token_len_per_gpu: Count = 32768


class Critic(ValueUpdate):
    strategy: Literal["megatron"] = Field(description=_MEGATRON)
    optim: Optim
    model: CriticModel
    megatron: TrainedMegatron
    load_weight: bool
    data_loader_seed: Seed | None
    kl_ctrl: KlControl


class RewardNetwork(Group):
    input_tokenizer: str | None
    path: Name
    external_lib: Name | None
    trust_remote_code: bool = False
    rm_tokenizer: Name | None = None


class Sandbox(Group):
    url: Name | None
    max_concurrent: Count


class OverlongBuffer(Group):
    enable: bool = False
    len: Whole = 0
    penalty_factor: NotNegative = 0.0
    log: bool = False


class Rewards(Group):
    """What both have of a reward model, and of the functions that stand in for it."""

    enable: Literal[False] = Field(
        description=f"a reward model is not supported yet; set custom_reward_function ({PAGE})"
    )
    model: RewardNetwork
    micro_batch_size: CountOrNone
    micro_batch_size_per_gpu: CountOrNone
    use_dynamic_bsz: bool
    max_length: CountOrNone
    reward_manager: Literal["naive", "prime", "batch", "dapo"]
    launch_reward_fn_async: bool
    sandbox_fusion: Sandbox
    forward_max_token_len_per_gpu: Count = 32768
    reward_kwargs: dict[str, Any] = {}
    overlong_buffer: OverlongBuffer | None = None


class RewardModel(Rewards):
    strategy: Literal["megatron"] = Field(description=_MEGATRON)
    megatron: Megatron
    load_weight: bool


class CustomReward(Group):
    path: Name | None
    name: Name
    reward_kwargs: dict[str, Any] = {}


class Reweighting(Group):
    reweight_method: Literal["pow", "max_min", "max_random"]
    weight_pow: float


class FilterGroups(Group):
    enable: bool = False
    metric: Name | None = None
    max_num_gen_batches: int = 0
    lower_bound: float | None = None
    upper_bound: float | None = None
    on_exhausted: Literal["fail", "stop_and_save"] = "fail"


Estimator = Literal[
    "grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo", "gae"
]


class Algorithm(Group):
    adv_estimator: Estimator
    gamma: Fraction
    lam: Fraction
    norm_adv_by_std_in_grpo: bool
    use_kl_in_reward: bool
    kl_penalty: KlEstimator
    kl_ctrl: KlControl
    use_pf_ppo: bool = False
    pf_ppo: Reweighting | None = None
    overlong_filtering: bool = False
    filter_groups: FilterGroups | None = None


class Trainer(Group):
    balance_batch: bool
    total_epochs: Count
    total_training_steps: CountOrNone
    project_name: Name
    experiment_name: Name
    logger: Annotated[list[Backend], Listed]
    log_val_generations: Whole
    nnodes: Count
    n_gpus_per_node: Count
    save_freq: Frequency
    resume_mode: Literal["disable", "auto", "resume_path"]
    resume_from_path: Name | None
    del_local_ckpt_after_load: Literal[False] = Field(description=_KEPT)
    val_before_train: bool
    test_freq: Frequency
    critic_warmup: Whole
    default_hdfs_dir: None = Field(description=_NO_HDFS)
    default_local_dir: Name
    max_actor_ckpt_to_keep: CountOrNone
    max_critic_ckpt_to_keep: None = Field(description="there is no critic; set actor_rollout_ref.overlay.checkpoint")
    ray_wait_register_center_timeout: Count
    device: Literal["npu"] = Field(description="training runs on NPUs; set it to npu")
    val_only: bool = False
    rollout_data_dir: Name | None = None
    validation_data_dir: Name | None = None
    remove_previous_ckpt_in_save: Literal[False] = Field(default=False, description=_KEPT)
    wandb_proxy: Name | None = None


class RayInit(Group):
    num_cpus: CountOrNone
    address: Name
    timeline_json_file: Name | None = None
    temp_dir: Name | None = None
    object_store_memory: Annotated[int, Field(ge=75 * 2**20)] | None = Field(
        default=None, description="give bytes, at least 78643200, which is Ray's smallest, or null"
    )


class RolloutInstance(Group):
    """Ours: sizes of a rollout instance, for a job to choose from."""

    all_dies: Count
    half_of_the_dies: Count


class MiniBatch(Group):
    """Ours: prompts of an update, for a job with several updates of a batch."""

    of_several: Count


class Thresholds(Group):
    reward_score: float | None = None
    kl_divergence: float | None = None
    entropy: float | None = None


class Alerting(Group):
    threshold: Thresholds | None = None


class Monitoring(Group):
    """Of guides to verl; `features.alerts.monitoring` says what its names are."""

    metrics: list[Literal["reward_score", "kl_divergence", "entropy", "gpu_utilization", "memory_usage"]] | None = None
    alerting: Alerting | None = None
    dashboard: Name | None = None


class Configuration(Group):
    """The whole of it."""

    data: Data
    actor_rollout_ref: ActorRolloutRef
    critic: Critic
    reward_model: RewardModel
    custom_reward_function: CustomReward
    algorithm: Algorithm
    trainer: Trainer
    ray_init: RayInit
    monitoring_config: Monitoring | None = None
    rollout_instance: RolloutInstance | None = None
    mini_batch: MiniBatch | None = None


def field_at(place: Iterable[str], schema: type[BaseModel] = Configuration) -> FieldInfo | None:
    """The field of a schema that lies at a place, given by the names of the groups and its own; None for no such."""
    group: type[BaseModel] | None = schema
    field = None
    for part in place:
        named = {each.alias or name: each for name, each in group.model_fields.items()} if group else {}
        if part not in named:
            return None
        field, group = named[part], group_of(named[part])
    return field


def group_of(field: FieldInfo) -> type[BaseModel] | None:
    """The group that a field holds, or may hold; None for a single value."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
