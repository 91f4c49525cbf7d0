"""This project's jobs for verl 0.9.1: real verl composes and checks them, and what cannot run is one sentence."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from rehearsal.stack_2026.jobs import JOBS
from rehearsal.stack_2026.plan import BACKENDS
from verl_plugin.jobs import JobError, check_job, compose_job
from verl_plugin.jobs.__main__ import main
from verl_plugin.jobs.composition import job_names

ONE_CARD, ONE_NODE = "qwen3_0_6b_gsm8k_one_card", "qwen3_30b_a3b_gsm8k_one_node"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# Groups that verl passes on to vLLM and Megatron-core, whose keys verl has no list of, and a key that is in verl's code
# (AgentLoopConfig) and in none of its files.
PASSED_ON = (
    f"{ROLLOUT}.engine_kwargs.vllm.",
    f"{ACTOR}.megatron.override_transformer_config.",
    f"{ROLLOUT}.agent.agent_loop_manager_class",
)
# https://huggingface.co/Qwen/Qwen3-0.6B and Qwen3-30B-A3B, config.json.
MODELS = {
    ONE_CARD: {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    ONE_NODE: {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}


def keys(node: DictConfig, prefix: str = "") -> set[str]:
    """Every key of a configuration, groups left out."""
    found = set()
    for name, value in OmegaConf.to_container(node).items():
        found |= keys(node[name], f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}"}
    return found


def model_folder(folder: Path, job: str) -> Path:
    (folder / "config.json").write_text(json.dumps(MODELS[job]))
    return folder


def test_every_job_can_be_scaled_down():
    assert set(job_names()) == set(JOBS) == set(MODELS)


@pytest.mark.parametrize("job", MODELS)
def test_job_has_keys_of_verl_alone(job):
    name = "ppo_megatron_trainer" if JOBS[job].backend == "megatron" else "ppo_trainer"
    with initialize_config_module("verl.trainer.config", version_base=None):
        known = keys(compose(name))
    config = compose_job(job)
    assert {key for key in keys(config) - known if not key.startswith(PASSED_ON)} == set()
    assert config.actor_rollout_ref.actor.strategy == JOBS[job].backend in BACKENDS


@pytest.mark.parametrize("job", MODELS)
def test_job_passes_the_checks_of_verl_and_of_this_project(job):
    config = check_job(compose_job(job), MODELS[job])
    assert config["trainer"]["device"] == "npu" and config["algorithm"]["adv_estimator"] == "grpo"


@pytest.mark.parametrize(
    ("job", "override", "says"),
    [
        (ONE_CARD, "data.train_batch_siz=8", "Set data.train_batch_size instead"),
        (ONE_CARD, "data.train_batch_size=[8", "data.train_batch_size=[8 is invalid"),
        (ONE_CARD, "data.train_batch_size=many", "data.train_batch_size=many is invalid"),
        (ONE_CARD, f"{ACTOR}.ppo_mini_batch_size=5", f"{ACTOR}.ppo_mini_batch_size=5 is invalid"),
        (ONE_CARD, f"{ACTOR}.ppo_max_token_len_per_gpu=1000", "a sequence may have 1536 tokens"),
        (ONE_CARD, f"{ROLLOUT}.tensor_model_parallel_size=2", "1 dies are no multiple"),
        (ONE_CARD, f"{ROLLOUT}.gpu_memory_utilization=60", "it is no share"),
        (ONE_CARD, f"{ACTOR}.strategy=fsdp3", f"{ACTOR}.strategy=fsdp3 is invalid"),
        (ONE_CARD, "actor_rollout_ref.model.external_lib=null", "vLLM's workers wait for alltoallv"),
        (ONE_CARD, f"~{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls", "training sends by alltoallv"),
        (ONE_CARD, f"{ROLLOUT}.engine_kwargs.vllm.additional_config.alltoallv.bucket_megabytes=0", "at least 1 MiB"),
        (ONE_CARD, "data.max_response_length=50000", "a sequence may have 50512 tokens"),
        (ONE_NODE, f"{ACTOR}.megatron.expert_model_parallel_size=12", "16 dies are no multiple of EP12"),
        (ONE_NODE, f"{ACTOR}.megatron.context_parallel_size=2", "alltoallv has no layout for it"),
        (ONE_NODE, f"{ACTOR}.megatron.expert_model_parallel_size=1", "alltoallv has no layout for it with TP2 and EP1"),
        (ONE_NODE, f"{ROLLOUT}.n=1 {ACTOR}.ppo_mini_batch_size=4", "its 4 answers are no multiple of 8 replicas"),
        (ONE_NODE, f"{ACTOR}.megatron.dtype=fp9", "verl rejects the configuration: dtype fp9 not supported"),
    ],
)
def test_value_that_cannot_run_is_one_sentence(tmp_path, capsys, job, override, says):
    path = f"actor_rollout_ref.model.path={model_folder(tmp_path, job)}"
    assert main(["--config-name", job, path, *override.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and len(said.splitlines()) == 1 and says in said, said


def test_model_that_does_not_fit_the_job_rejected():
    config = compose_job(ONE_NODE, [f"{ROLLOUT}.tensor_model_parallel_size=16"])
    with pytest.raises(JobError, match="tensor_model_parallel_size=16 is invalid: the model has 24 attention heads"):
        check_job(config, MODELS[ONE_NODE] | {"num_attention_heads": 24})
    with pytest.raises(JobError, match="the model has 0 experts"):
        check_job(compose_job(ONE_NODE), MODELS[ONE_CARD])
    with pytest.raises(JobError, match="no layout table describes architecture LlamaForCausalLM"):
        check_job(config, MODELS[ONE_CARD] | {"architectures": ["LlamaForCausalLM"]})


def test_unknown_job_rejected(capsys):
    assert main(["--config-name", "one_node"]) == 2
    assert f"Set it to {ONE_CARD} or {ONE_NODE}." in capsys.readouterr().err
