"""Groups of keys of the job: algorithm, trainer, Ray, monitoring, and sizes for a job to choose from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_patches.trainer.configuration_checks.schema.training import KlControl
from verl_patches.trainer.configuration_checks.schema.values import (
    Backend,
    Count,
    CountOrNone,
    Fraction,
    Frequency,
    KeyGroup,
    KlEstimator,
    Listed,
    Name,
    Whole,
)

_KEPT = "the resumed checkpoint is kept until a newer one is complete; set it to false"
_WHOLE = "a step's checkpoint has actor and critic and is kept as a whole; set actor_rollout_ref.overlay.checkpoint"
_NO_HDFS = "checkpoints are only written to trainer.default_local_dir; remove it"


class Reweighting(KeyGroup):
    reweight_method: Literal["pow", "max_min", "max_random"]
    weight_pow: float


class FilterGroups(KeyGroup):
    enable: bool = False
    metric: Name | None = None
    max_num_gen_batches: int = 0
    lower_bound: float | None = None
    upper_bound: float | None = None
    on_exhausted: Literal["fail", "stop_and_save"] = "fail"


Estimator = Literal[
    "grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo", "gae"
]


class Algorithm(KeyGroup):
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


class Trainer(KeyGroup):
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
    max_critic_ckpt_to_keep: None = Field(description=_WHOLE)
    ray_wait_register_center_timeout: Count
    device: Literal["npu"] = Field(description="training runs on NPUs; set it to npu")
    val_only: bool = False
    rollout_data_dir: Name | None = None
    validation_data_dir: Name | None = None
    remove_previous_ckpt_in_save: Literal[False] = Field(default=False, description=_KEPT)
    wandb_proxy: Name | None = None


class RayInit(KeyGroup):
    num_cpus: CountOrNone
    address: Name
    timeline_json_file: Name | None = None
    temp_dir: Name | None = None
    object_store_memory: Annotated[int, Field(ge=75 * 2**20)] | None = Field(
        default=None, description="set it to bytes, at least 78643200, Ray's minimum, or null"
    )


class RolloutInstance(KeyGroup):
    """The overlay's own: sizes of a rollout instance, for a job to choose from."""

    all_dies: Count
    half_of_the_dies: Count


class MiniBatch(KeyGroup):
    """The overlay's own: prompts per update, for a job with several updates per batch."""

    of_several: Count


class Thresholds(KeyGroup):
    reward_score: float | None = None
    kl_divergence: float | None = None
    entropy: float | None = None


class Alerting(KeyGroup):
    threshold: Thresholds | None = None


class Monitoring(KeyGroup):
    """Monitoring keys from guides to verl; `features.alerts.monitoring` maps their names to metrics."""

    metrics: list[Literal["reward_score", "kl_divergence", "entropy", "gpu_utilization", "memory_usage"]] | None = None
    alerting: Alerting | None = None
    dashboard: Name | None = None
