"""The jobs of `verl_plugin/config` scaled down to emulated dies. Keys that are not set here keep the job's values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from verl_plugin.offload import LIBRARY as OFFLOAD
from verl_plugin.resume.checks import ENGINES as RESUME
from verl_plugin.rollout.sync_window import EXECUTOR_KEY

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_VLLM = f"{_ROLLOUT}.engine_kwargs.vllm"
_TRANSFORMER = f"{_ACTOR}.megatron.override_transformer_config"
_ENGINES = "verl_plugin.alltoallv.engines"


@dataclass(frozen=True)
class ScaledJob:
    """Scales a job of real dies down to emulated dies.

    Attributes:
        model: the tiny model's family.
        backend: the job's training engine.
        dies: default number of emulated dies.
        steps: default number of training steps.
        changes: other values of the tiny model's config.json, as published.
        cluster: the job has pipeline stages in training, and data-parallel ranks in an instance of vLLM, and keeps
            both where the dies suffice.
    """

    model: str
    backend: str
    dies: int
    steps: int = 10
    changes: Mapping[str, int | str] = field(default_factory=dict)
    cluster: bool = False


JOBS = {
    "qwen3_0_6b_gsm8k_one_card": ScaledJob("qwen3", "fsdp2", dies=1, changes={"tie_word_embeddings": "true"}),
    "qwen3_30b_a3b_gsm8k_one_node": ScaledJob("qwen3_moe", "megatron", dies=4),
    "deepseek_v3_671b_256_dies": ScaledJob("deepseek_v3", "megatron", dies=4, cluster=True),
    "qwen3_235b_a22b_128_dies": ScaledJob("qwen3_moe", "megatron", dies=4, cluster=True),
}
# Layers of the tiny models with experts; the first of two stages has one more than the last.
_LAYERS = 3


def scaled_down(job: ScaledJob, steps: int, seed: int, dies: int, own_layers: bool = False) -> Iterator[str]:
    """Yield Hydra overrides that make the job one of a tiny model, short answers and few processes.

    Algorithm, engines, offloading, micro batches by tokens, and how weights move stay the job's own.

    Args:
        job: the job.
        steps: training steps.
        seed: of data, rollout and training.
        dies: emulated dies.
        own_layers: whether a job on Megatron keeps MindSpeed's layers, which no registry serves.
    """
    prompts, mini = (8, 8) if job.cluster else (16, 8)
    yield from (f"data.train_batch_size={prompts}", f"{_ACTOR}.ppo_mini_batch_size={mini}")
    yield from ("data.max_prompt_length=16", "data.max_response_length=10")
    yield from ("data.dataloader_num_workers=0", f"data.seed={seed}", f"{_ACTOR}.data_loader_seed={seed}")
    yield from (f"{_ACTOR}.ppo_max_token_len_per_gpu=1024", f"{_ACTOR}.optim.lr=1e-4")
    yield from ("trainer.total_epochs=1000", f"trainer.total_training_steps={steps}")
    yield from ("trainer.nnodes=1", f"trainer.n_gpus_per_node={dies}")
    yield from ("trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.logger=[console,file]")
    yield from (f"{_ROLLOUT}.seed={seed}", f"{_ROLLOUT}.max_model_len=32", f"{_ROLLOUT}.max_num_seqs=128")
    tp = 2 if dies % 2 == 0 else 1
    yield from (f"{_ROLLOUT}.tensor_model_parallel_size={tp}", f"{_ROLLOUT}.enforce_eager=true")
    if job.cluster:
        yield from (f"{_ROLLOUT}.data_parallel_size={dies // tp}", f"{_ROLLOUT}.expert_parallel_size={dies}")
        if dies == tp:
            yield f"{EXECUTOR_KEY}=mp"  # one engine has nobody to agree with
        # As if there were two nodes, each of which has the layers of one stage alone.
        yield f"{_VLLM}.additional_config.alltoallv.dies_per_node={max(dies // 2, 1)}"
    yield from (f"{_ROLLOUT}.max_num_batched_tokens=2048", f"{_ROLLOUT}.gpu_memory_utilization=0.5")
    # Enough for every sequence in flight: clearing the cache takes a host's time here.
    yield f"+{_VLLM}.num_gpu_blocks_override=256"
    # Every update is compared bit for bit, which a job of full size does not do.
    yield f"{_VLLM}.additional_config.alltoallv.bucket_megabytes=16"
    yield f"+{_VLLM}.additional_config.alltoallv.verify=true"
    yield f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=16"
    if job.backend == "megatron":
        yield from () if own_layers else _layers_of_megatron()
        yield from _megatron(job, dies, own_layers)


def _layers_of_megatron() -> Iterator[str]:
    """Yield the keys for Megatron-core's own layers in place of MindSpeed's: docs/stacks.md."""
    own = "verl_plugin.megatron_core,verl_plugin.finite_steps"
    yield f"actor_rollout_ref.model.external_lib=[{own},{RESUME},{_ENGINES},verl_plugin.phase_peaks,{OFFLOAD}]"
    # They take padded batches.
    yield from ("actor_rollout_ref.model.use_remove_padding=false", f"{_ACTOR}.megatron.use_remove_padding=false")


def _megatron(job: ScaledJob, dies: int, own_layers: bool) -> Iterator[str]:
    """Yield the sizes of the training dies, and what Megatron-core's own layers lack."""
    if not own_layers:
        yield f"{_TRANSFORMER}.moe_permute_fusion=false"
    stages = 2 if job.cluster and dies % 2 == 0 else 1
    # Whole steps of Megatron-core's layers have only been run with experts spread over dies.
    tensor = 2 if own_layers and dies % (2 * stages) == 0 else 1
    yield f"{_ACTOR}.megatron.tensor_model_parallel_size={tensor}"
    yield f"{_ACTOR}.megatron.expert_model_parallel_size={dies // stages}"
    if job.cluster:
        first, last = (_LAYERS - 1, 1) if stages == 2 else ("null", "null")
        yield f"{_ACTOR}.megatron.pipeline_model_parallel_size={stages}"
        yield f"{_TRANSFORMER}.num_layers_in_first_pipeline_stage={first}"
        yield f"{_TRANSFORMER}.num_layers_in_last_pipeline_stage={last}"
