"""Features without a configuration of their own: most let the pinned upstreams run with each other and on an NPU."""

from overlay import Feature, Key

_KV_CACHE_BLOCKS = "actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override"
_ROLLOUT_SEED = "actor_rollout_ref.rollout.seed"

SETTINGS = Feature("settings", "Every process of a run knows the overlay's configuration before it builds anything.")
MEGATRON_ON_NPU = Feature("megatron_on_npu", "Megatron-core, which is written for CUDA, runs on an NPU.")
VERL_ON_NPU = Feature(
    "verl_on_npu", "verl's batches move to and from an NPU correctly, and FSDP's rollout can start on one."
)
VERL_ON_MEGATRON_CORE = Feature(
    "verl_on_megatron_core", "verl 0.4.0, which is written for megatron-core 0.12, runs on 0.8.0."
)
DATA_FILES = Feature("data_files", "verl reads the parquet files of every release of datasets.")
IMAGE_PROMPTS = Feature("image_prompts", "Prompts that are too long with the tokens of their images are dropped.")
ENTROPY_BONUS = Feature(
    "entropy_bonus", "An entropy bonus can be trained on Megatron; upstream fails at the first update."
)
FULLY_SHARDED = Feature(
    "fully_sharded", "FSDP2 of verl 0.4.0, which is written for CUDA and later releases of torch, runs on an NPU."
)
VERL_ON_VLLM = Feature(
    "verl_on_vllm", "verl 0.4.0 starts engines of vLLM 0.9.1, for text models and for those that read images."
)
IMAGES = Feature(
    "images", "Models that read images compute on an NPU, and their rollout takes new weights on any number of dies."
)
VLLM_ON_TORCH = Feature("vllm_on_torch", "vLLM 0.9.1, which is written for torch 2.7, runs on 2.5.1.")
OWN_MODELS = Feature(
    "own_models", "verl trains families that the pinned megatron-core cannot build, with this project's modules."
)
START_UP = Feature("start_up", "vLLM does not start a second Python process for every engine to inspect a model class.")
VLLM_PROCESSES = Feature(
    "vllm_processes", "Processes that vLLM spawns have the patches and the settings of their parent."
)
SLEEP_MODE = Feature("sleep_mode", "vLLM-Ascend's sleep mode does not free memory that the device still uses.")
KV_CACHE_SIZE = Feature(
    "kv_cache_size",
    "vLLM keeps to its configured number of KV cache blocks.",
    keys=(Key("kv_cache_blocks", _KV_CACHE_BLOCKS, int, None),),
    switch=_KV_CACHE_BLOCKS,
    is_on=lambda settings: settings.kv_cache_blocks is not None,
)
ROLLOUT_SEED = Feature(
    "rollout_seed",
    "With a seed the rollout is reproducible, and still draws new samples at every step and on every engine.",
    keys=(Key("rollout_seed", _ROLLOUT_SEED, int, None),),
    switch=_ROLLOUT_SEED,
    is_on=lambda settings: settings.rollout_seed is not None,
)
