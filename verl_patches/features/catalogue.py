"""All features, in the order in which a user meets them."""

from verl_patches.features.compatibility.feature import (
    KV_CACHE_SIZE,
    MEGATRON_ON_NPU,
    OWN_MODELS,
    ROLLOUT_SEED,
    SETTINGS,
    START_UP,
    VERL_ON_MEGATRON_CORE_0_8,
    VERL_ON_NPU,
    VERL_ON_VLLM_0_9_1,
    VLLM_ON_TORCH_2_5,
    VLLM_PROCESSES,
)
from verl_patches.features.data_order.feature import DATA_ORDER
from verl_patches.features.direct_loading.feature import DIRECT_LOADING
from verl_patches.features.dp_sync.feature import DP_SYNC
from verl_patches.features.learning_rate.feature import LEARNING_RATE
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.mindspeed.feature import MINDSPEED
from verl_patches.features.nonfinite.feature import NONFINITE
from verl_patches.features.onpolicy.feature import ONPOLICY
from verl_patches.features.precision.feature import PRECISION
from verl_patches.features.reshard.feature import RESHARD
from verl_patches.features.residency.feature import RESIDENCY
from verl_patches.features.rollout_parallel.feature import ROLLOUT_EXPERT_PARALLEL
from verl_patches.features.router_balance.feature import ROUTER_BALANCE
from verl_patches.features.temperature.feature import TEMPERATURE
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT
from verl_patches.features.watch.feature import WATCH

FEATURES = (
    RESHARD,
    RESIDENCY,
    ONPOLICY,
    DP_SYNC,
    ROLLOUT_EXPERT_PARALLEL,
    TEMPERATURE,
    NONFINITE,
    DIRECT_LOADING,
    TRAINING_CHECKPOINT,
    DATA_ORDER,
    LEARNING_RATE,
    MINDSPEED,
    ROUTER_BALANCE,
    PRECISION,
    MEASURE,
    WATCH,
    ROLLOUT_SEED,
    KV_CACHE_SIZE,
    START_UP,
    SETTINGS,
    OWN_MODELS,
    MEGATRON_ON_NPU,
    VERL_ON_NPU,
    VERL_ON_MEGATRON_CORE_0_8,
    VERL_ON_VLLM_0_9_1,
    VLLM_ON_TORCH_2_5,
    VLLM_PROCESSES,
)
