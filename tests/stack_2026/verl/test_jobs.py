"""This project's jobs for verl 0.9.1: real verl composes and checks them, and invalid ones get a one-line error."""

import json
import re
from itertools import product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from post_training.plan.verl_0_9_jobs import stage_layers
from post_training.report.run_folder import at
from rehearsal.plan import ROOT
from rehearsal.stack_2026.jobs import JOBS, scaled_down
from rehearsal.stack_2026.plan import BACKENDS
from verl_plugin.alltoallv.settings import LIBRARY
from verl_plugin.heartbeats.settings import ENGINES as HEARTBEATS
from verl_plugin.jobs import JobError, check_job, compose_job
from verl_plugin.jobs.__main__ import main
from verl_plugin.jobs.composition import job_names
from verl_plugin.rollout.sync_window import EXECUTOR, EXECUTOR_KEY

ONE_CARD, ONE_NODE = "qwen3_0_6b_gsm8k_one_card", "qwen3_30b_a3b_gsm8k_one_node"
DIES_256, DIES_128 = "deepseek_v3_671b_256_dies", "qwen3_235b_a22b_128_dies"
CLUSTER = (DIES_256, DIES_128)
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CONTEXT, REF = f"{ACTOR}.megatron.context_parallel_size", "actor_rollout_ref.ref.megatron"
LONG_ANSWERS = f"data.max_response_length=12000 {ROLLOUT}.max_num_batched_tokens=16384"
LIBRARIES = "actor_rollout_ref.model.external_lib=[verl_plugin.megatron_core,verl_plugin.alltoallv.engines]"
TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"
ULYSSES = "ulysses_sequence_parallel_size"
IN_GROUPS = " ".join(f"actor_rollout_ref.{role}.fsdp_config.{ULYSSES}=4" for role in ("actor", "ref"))
SHARED = f"trainer.n_gpus_per_node=4 {ACTOR}.{ULYSSES}=4"
OVERLAP = f"{TRANSFORMER}.moe_shared_expert_overlap"
# Groups that verl passes on to vLLM, Megatron-core and Ray without listing their keys, and a key that is in verl's code
# (AgentLoopConfig) but in none of its configuration files.
PASSED_ON = (
    f"{ROLLOUT}.engine_kwargs.vllm.",
    f"{ACTOR}.megatron.override_transformer_config.",
    f"{ACTOR}.optim.override_optimizer_config.",
    "ray_kwargs.ray_init.runtime_env.",
    f"{ROLLOUT}.agent.agent_loop_manager_class",
)
# config.json of https://huggingface.co/Qwen/Qwen3-0.6B, Qwen3-30B-A3B and Qwen3-235B-A22B; DeepSeek-V3's for training.
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
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    DIES_256: json.loads((ROOT / "verl_patches" / "config.json").read_text()),
}
MODELS[DIES_128] = MODELS[ONE_NODE] | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
WINDOWS = f"++{EXECUTOR_KEY}={EXECUTOR}"
FOUR_ENGINES = f"{ROLLOUT}.data_parallel_size=4 {ROLLOUT}.enforce_eager=true"
SHORT_WINDOWS = f"++{ROLLOUT}.engine_kwargs.vllm.additional_config.sync_windows.forwards=0"


def keys(node: DictConfig, prefix: str = "") -> set[str]:
    """Return every key of a configuration, without groups."""
    found = set()
    for name, value in OmegaConf.to_container(node).items():
        found |= keys(node[name], f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}"}
    return found


def model_folder(folder: Path, job: str) -> Path:
    (folder / "config.json").write_text(json.dumps(MODELS[job]))
    return folder


@pytest.mark.parametrize("shared", [SHARED, f"trainer.n_gpus_per_node=4 {IN_GROUPS}"])
def test_dies_that_share_sequences_make_one_replica_with_all_their_tokens(shared):
    own = f"{shared} {ACTOR}.ppo_mini_batch_size=1 {ACTOR}.ppo_max_token_len_per_gpu=400"
    check_job(compose_job(ONE_CARD, own.split()), MODELS[ONE_CARD])


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
        (ONE_CARD, f"{ROLLOUT}.tensor_model_parallel_size=2", "1 dies are not a multiple"),
        (ONE_CARD, f"{ACTOR}.{ULYSSES}=2", f"{ACTOR}.fsdp_config.{ULYSSES}=2 is invalid: 1 dies are not a multiple"),
        (ONE_CARD, f"{ACTOR}.fsdp_config.{ULYSSES}=0", "not a count"),
        (
            ONE_CARD,
            f"{SHARED} {ACTOR}.ppo_max_token_len_per_gpu=300",
            "1536 tokens, and 4 dies share it. Set it to 384",
        ),
        (ONE_CARD, f"{SHARED} actor_rollout_ref.model.use_remove_padding=false", "only packed batches can be shared"),
        (DIES_256, f"trainer.nnodes=3 {ROLLOUT}.data_parallel_size=6", "an instance of 12 dies would lie on two nodes"),
        (ONE_CARD, f"{ROLLOUT}.gpu_memory_utilization=60", "not a share"),
        (ONE_CARD, f"{ACTOR}.strategy=fsdp3", f"{ACTOR}.strategy=fsdp3 is invalid"),
        (ONE_CARD, "actor_rollout_ref.model.external_lib=null", "vLLM's workers wait for alltoallv"),
        (ONE_CARD, f"~{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls", "training sends by alltoallv"),
        (ONE_CARD, f"{ROLLOUT}.engine_kwargs.vllm.additional_config.alltoallv.bucket_megabytes=0", "at least 1 MiB"),
        (ONE_CARD, "data.max_response_length=50000", "a sequence may have 50512 tokens"),
        (ONE_NODE, f"{ACTOR}.megatron.expert_model_parallel_size=12", "16 dies are not a multiple of EP12"),
        (ONE_NODE, f"{CONTEXT}=3", "16 dies are not a multiple of TP2 x CP3 x PP1. Set it to a divisor of 8"),
        (ONE_NODE, f"{CONTEXT}=2 {LONG_ANSWERS}", "may have 12512 tokens, and 2 dies share it"),
        (ONE_NODE, f"{CONTEXT}=2 {ACTOR}.ppo_mini_batch_size=2 {ROLLOUT}.n=1", "not a multiple of 4 replicas. Set"),
        (ONE_NODE, f"{CONTEXT}=2 {LIBRARIES}", "only MindSpeed's layers share sequences"),
        (ONE_NODE, f"{CONTEXT}=2 actor_rollout_ref.model.use_remove_padding=false", "batches have to be packed"),
        (
            ONE_NODE,
            f"{CONTEXT}=2 +{TRANSFORMER}.context_parallel_algo=kvallgather_cp_algo",
            "verl two chunks of",
        ),
        (ONE_NODE, f"{CONTEXT}=2 +{TRANSFORMER}.context_parallel_algo=ulysses_cp_algo", "exchanges no heads"),
        (ONE_NODE, f"{CONTEXT}=2 +{TRANSFORMER}.context_parallel_algo=adaptive_cp_algo", "it has not been run"),
        (ONE_NODE, f"{CONTEXT}=2 {REF}.context_parallel_size=1", "share their process groups"),
        (ONE_NODE, f"{REF}.tensor_model_parallel_size=1", "share their process groups"),
        (ONE_NODE, f"+{ACTOR}.megatron.override_ddp_config.overlap_param_gather=true", "given the old ones"),
        (ONE_NODE, f"+{TRANSFORMER}.pipeline_model_parallel_layout=Et", "first layer without it"),
        (ONE_NODE, f"+{ROLLOUT}.engine_kwargs.vllm.hf_overrides.rope_theta=10000", "only the rollout reads it"),
        (ONE_CARD, f"{ROLLOUT}.data_parallel_size=2 trainer.n_gpus_per_node=2", "a model without experts no ranks"),
        (ONE_CARD, f"{ROLLOUT}.log_prob_use_dynamic_bsz=true {ROLLOUT}.log_prob_max_token_len_per_gpu=1000", "1536"),
        (ONE_CARD, "trainer.resume_mode=resume", "no such mode. Set it to disable or auto or resume_path"),
        (ONE_CARD, "trainer.resume_mode=resume_path", "trainer.resume_from_path=None is invalid: not the folder of a"),
        (ONE_CARD, "trainer.resume_mode=resume_path trainer.resume_from_path=/r/global_step_20/", "without a slash"),
        (ONE_CARD, "trainer.v1.sampler.sync_refill_failed_groups=true", "verl refills only its own buffer"),
        (ONE_CARD, "trainer.save_freq=null", "trainer.save_freq=None is invalid: not a number of steps"),
        (ONE_CARD, "trainer=abc", "trainer=abc is invalid: not a group of keys"),
        (ONE_CARD, "data=null", "data=null is invalid: not a group of keys"),
        (ONE_CARD, f"{ROLLOUT}.engine_kwargs.vllm=abc", "engine_kwargs.vllm=abc is invalid: not a group of keys"),
        (ONE_CARD, "actor_rollout_ref.model.external_lib=5", "external_lib=5 is invalid: not a list"),
        (ONE_CARD, "+trainer.hang_detection=5", "trainer.hang_detection=5 is invalid: not a group of keys"),
        (ONE_CARD, "+trainer.record_steps=5", "trainer.record_steps=5 is invalid: not a list"),
        (ONE_CARD, "+trainer.record_max_mib=abc", "trainer.record_max_mib=abc is invalid: not a number"),
        (ONE_CARD, f"{ACTOR}.ppo_max_token_len_per_gpu=abc", "ppo_max_token_len_per_gpu=abc is invalid: not a number"),
        (
            ONE_CARD,
            f"actor_rollout_ref.model.external_lib=[{HEARTBEATS},{LIBRARY}]",
            f"with {HEARTBEATS} behind {LIBRARY}",
        ),
        (ONE_CARD, f"{ACTOR}.use_kl_loss=abc", "use_kl_loss=abc is invalid: not a switch. Set it to true or false"),
        (ONE_NODE, f"{ACTOR}.megatron.dynamic_context_parallel=true", "has no groups for it"),
        (DIES_256, f"+{OVERLAP}=true", f"{OVERLAP}=True is invalid: MindSpeed gathers"),
        (DIES_256, f"{CONTEXT}=2", "multi_latent_attention=None is invalid: with"),
        (ONE_NODE, f"{ACTOR}.megatron.expert_model_parallel_size=1", "alltoallv has no layout for it with TP2 and EP1"),
        (ONE_NODE, f"{ROLLOUT}.n=1 {ACTOR}.ppo_mini_batch_size=4", "its 4 answers are not a multiple of 8 replicas"),
        (ONE_NODE, f"{ACTOR}.megatron.dtype=fp9", "verl rejects the configuration: dtype fp9 not supported"),
        (
            DIES_256,
            f"{ROLLOUT}.data_parallel_size=96",
            "256 dies are not a multiple of TP2 x DP96. Set it to a divisor of 128",
        ),
        (DIES_256, f"~{ROLLOUT}.engine_kwargs.vllm.worker_cls", "loses tokens when experts are on several dies"),
        (DIES_256, f"~{ROLLOUT}.engine_kwargs.vllm.worker_cls {ROLLOUT}.enforce_eager=true", "loses tokens"),
        (ONE_NODE, f"~{ROLLOUT}.engine_kwargs.vllm.all2all_backend", "tokens are wrong with vLLM's default"),
        (
            DIES_256,
            "trainer.v1.trainer_mode=sync",
            "over several nodes it needs trainer.v1.trainer_mode=sync_onpolicy or sync_recorded, not sync",
        ),
        (DIES_256, f"{ROLLOUT}.data_parallel_size=1 {ROLLOUT}.expert_parallel_size=2", "there is only one engine"),
        (ONE_NODE, WINDOWS, "there is only one engine"),
        (ONE_NODE, f"{WINDOWS} {FOUR_ENGINES} {SHORT_WINDOWS}", "Set it to a whole number above 0"),
        (ONE_NODE, f"{WINDOWS} {FOUR_ENGINES} ~{ROLLOUT}.engine_kwargs.vllm.worker_cls", "windows need "),
        (DIES_256, f"{ROLLOUT}.expert_parallel_size=64", "over all 128 dies of an instance"),
        (
            DIES_256,
            f"{ROLLOUT}.data_parallel_size=4 {ROLLOUT}.tensor_model_parallel_size=32",
            "16 dies of a node are not a mult",
        ),
        (
            DIES_256,
            "trainer.n_gpus_per_node=12 trainer.nnodes=32",
            "128 dies of an instance do not fill whole nodes of 12",
        ),
        (DIES_256, f"{ACTOR}.megatron.expert_model_parallel_size=2", "alltoallv has no layout for it with TP4 and EP2"),
        (
            DIES_256,
            f"{TRANSFORMER}.num_layers_in_first_pipeline_stage=8",
            "47 of 61 layers do not fill 6 stages evenly",
        ),
        (
            DIES_128,
            f"{TRANSFORMER}.num_layers_in_last_pipeline_stage=null",
            "83 of 94 layers do not fill 7 stages evenly",
        ),
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
    with pytest.raises(JobError, match="no sharding spec for architecture LlamaForCausalLM"):
        check_job(config, MODELS[ONE_CARD] | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(JobError, match="num_nextn_predict_layers=1"):
        check_job(compose_job(DIES_256), MODELS[DIES_256] | {"num_nextn_predict_layers": 1})
    with pytest.raises(JobError, match="expert_parallel_size=128 is invalid: the model has 64 experts"):
        check_job(compose_job(DIES_128), MODELS[DIES_128] | {"num_experts": 64})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("job", "changes", "says"),
    [
        (
            ONE_NODE,
            {"rope_scaling": YARN},
            "rope_type=yarn is invalid: vLLM scales positions of qwen3_moe",
        ),
        (ONE_NODE, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type=linear is invalid"),
        (
            ONE_NODE,
            {"norm_topk_prob": False},
            "norm_topk_prob=False is invalid: Megatron-core normalises",
        ),
        (DIES_256, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear is invalid"),
        (ONE_NODE, {"norm_topk_prob": None}, "norm_topk_prob=None is invalid"),
        (DIES_256, {"norm_topk_prob": False}, "norm_topk_prob=False is invalid"),
        (
            ONE_NODE,
            {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_experts": None},
            "no bridge for",
        ),
        (ONE_CARD, {"rope_scaling": YARN}, ""),  # transformers scales them in training too
        (DIES_256, {}, ""),  # its YaRN is built
    ],
)
def test_model_that_megatron_builds_differently_from_the_rollout_rejected(job, changes, says):
    overrides = [f"{ACTOR}.megatron.expert_model_parallel_size=1", f"{ROLLOUT}.expert_parallel_size=1"]
    overrides += [f"{ACTOR}.megatron.expert_tensor_parallel_size=2", f"{REF}.expert_tensor_parallel_size=2"]
    config = compose_job(job, overrides if changes.get("model_type") == "qwen2" else [])
    model = MODELS[job] | changes
    if says:
        with pytest.raises(JobError, match=re.escape(says)):
            check_job(config, model)
    else:
        check_job(config, model)


@pytest.mark.parametrize("shared", ["all_jobs", "cluster", "megatron"])
def test_unknown_job_rejected(capsys, shared):
    assert main(["--config-name", shared]) == 2
    assert f"Set it to {' or '.join(sorted(MODELS))}." in capsys.readouterr().err


@pytest.mark.parametrize("job", CLUSTER)
def test_job_of_a_cluster_keeps_its_layout_on_few_dies(job):
    """On four dies the job keeps training's stages, expert ranks and vLLM's data parallelism, and passes the checks."""
    given = [
        word for word in scaled_down(JOBS[job], 2, 1, dies=4) if not word.startswith("actor_rollout_ref.model.ext")
    ]
    config = check_job(compose_job(job, given))
    megatron, rollout = at(config, f"{ACTOR}.megatron"), at(config, ROLLOUT)
    sizes = [megatron[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "expert_model")]
    assert sizes == [1, 2, 2] and [rollout[f"{name}_parallel_size"] for name in ("data", "expert")] == [
        2,
        4,
    ]
    assert at(config, EXECUTOR_KEY) == EXECUTOR  # both engines are on one node
    assert EXECUTOR not in " ".join(scaled_down(JOBS[job], 2, 1, dies=2))  # there is one
    full = check_job(compose_job(job), MODELS[job])
    for key in ("algorithm.adv_estimator", f"{ROLLOUT}.n", f"{ACTOR}.megatron.optimizer_offload"):
        assert at(config, key) == at(full, key)
    optimizers = [at(each, f"{ACTOR}.optim.override_optimizer_config") for each in (config, full)]
    assert optimizers[0] == optimizers[1]
    if job == DIES_256:
        assert optimizers[0]["optimizer_cpu_offload"] and optimizers[0]["use_precision_aware_optimizer"]
    assert stage_layers(megatron, 3) == (2, 1)


def naive_stages(stages: int, first: int | None, last: int | None, layers: int) -> tuple[int, ...] | None:
    """Find by trial the stages that Megatron-core would build, or return None if there are none."""
    for each in range(1, layers + 1):
        found = [each] * stages
        if first is not None:
            found[0] = first
        if last is not None:
            found[-1] = last
        if sum(found) == layers and min(found) >= 1:
            return tuple(found)
    return None


def test_layers_of_stages_are_those_of_a_naive_search():
    for stages, first, last, layers in product((1, 2, 3, 8), (None, 0, 1, 3), (None, 0, 2, 3), (1, 4, 7, 24)):
        if stages == 1 and None not in (first, last):
            continue  # one stage is first and last
        group = {
            "pipeline_model_parallel_size": stages,
            "override_transformer_config": {
                "num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last
            },
        }  # fmt: skip
        expected = naive_stages(stages, first, last, layers)
        if expected is None:
            with pytest.raises(ValueError, match="do not fill"):
                stage_layers(group, layers)
        else:
            assert stage_layers(group, layers) == expected
