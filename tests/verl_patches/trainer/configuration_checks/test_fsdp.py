"""A configuration for FSDP: the values to which it resolves, and the ones that are rejected in one sentence."""

from __future__ import annotations

import json
from functools import cache, reduce
from operator import getitem

import pytest
from omegaconf import OmegaConf

from tests.post_training.models.published_configs import PUBLISHED_CONFIGS
from verl_patches.trainer.configuration_checks import ConfigurationError, check_configuration
from verl_patches.trainer.configuration_checks.backends import backend_of
from verl_patches.trainer.main_ppo import compose, main

NAME = "qwen2_5_0_5b_gsm8k"
MODEL = "actor_rollout_ref.model.path=/weights"
SMALLEST = PUBLISHED_CONFIGS["Qwen/Qwen2.5-0.5B-Instruct"]
# The settings of the published quick start as on its command line, without the paths of model and data.
PUBLISHED = """
algorithm.adv_estimator=grpo
data.train_batch_size=128
data.max_prompt_length=512
data.max_response_length=128
data.filter_overlong_prompts=True
data.truncation='error'
actor_rollout_ref.actor.optim.lr=5e-7
actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.actor.entropy_coeff=0.001
actor_rollout_ref.actor.ppo_mini_batch_size=64
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=20
actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40
actor_rollout_ref.rollout.enable_chunked_prefill=False
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.n=5
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40
actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.kl_ctrl.kl_coef=0.001
trainer.critic_warmup=0
trainer.logger=['console']
trainer.project_name='verl_grpo_example_gsm8k'
trainer.experiment_name='qwen2_7b_function_rm'
trainer.n_gpus_per_node=8
trainer.nnodes=1
trainer.save_freq=-1
trainer.test_freq=5
trainer.total_epochs=1
trainer.device=npu
""".split()
OTHERS = {"True": "false", "False": "true"}
GAE = "algorithm.adv_estimator=gae"
ULYSSES = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
REFERENCE = "actor_rollout_ref.ref.ulysses_sequence_parallel_size"
UNPADDED = "actor_rollout_ref.model.use_remove_padding=true"


@cache
def plain(*overrides):
    return OmegaConf.to_container(compose(NAME, [MODEL, *overrides]), resolve=True)


def test_the_configuration_is_the_published_command_line():
    """verl reads every published setting, and giving one again changes nothing."""
    configuration = plain()
    assert plain(*PUBLISHED) == configuration
    check_configuration(configuration)


def test_unpublished_setting_detected():
    """The control of the test above, for each line: another value gives another configuration."""
    others = [f"{line.partition('=')[0]}={OTHERS.get(line.partition('=')[2], 7)}" for line in PUBLISHED]
    configuration, changed = plain(), plain(*others)
    for line in PUBLISHED:
        key = line.partition("=")[0].split(".")
        assert reduce(getitem, key, configuration) != reduce(getitem, key, changed), line


def test_megatron_configuration_is_not_mistaken_for_fsdp():
    assert backend_of(compose(NAME, [MODEL])) == "fsdp"
    assert backend_of(compose("rehearsal", [MODEL])) == backend_of({}) == "megatron"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "actor_rollout_ref.overlay.reshard.enabled=true",
            "reshard.enabled=True is for Megatron, .*[.] Set it to false",
        ),
        ("actor_rollout_ref.overlay.residency.enabled=true", "residency.enabled=True is for Megatron"),
        (
            "actor_rollout_ref.overlay.mindspeed.engine=auto",
            "mindspeed.engine=auto is for Megatron, .*[.] Set it to off",
        ),
        ("actor_rollout_ref.overlay.measure.verify_weights=true", "verify_weights=True .* find stale weights[.] Set"),
        ("actor_rollout_ref.overlay.rollout.expert_parallel_size=2", "expert_parallel_size=2 is for Megatron"),
        ("actor_rollout_ref.ref.strategy=fsdp2", "ref.strategy=fsdp2 is invalid: .* Set it to .*strategy=fsdp$"),
        ("reward_model.strategy=fsdp2", "strategy=fsdp2 is invalid: it should be 'fsdp'"),
        ("actor_rollout_ref.actor.strategy=megatron", "strategy=megatron is invalid: .*trains with FSDP; for Megatron"),
        (
            "+actor_rollout_ref.actor.megatron.seed=1",
            "unknown key actor_rollout_ref.actor.megatron.seed, .*: it belongs to Megatron",
        ),
        ("actor_rollout_ref.actor.fsdp_config.offload_policy=true", "offload_policy=true is invalid"),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=2", "fsdp_size=2 is invalid"),
        ("critic.model.use_remove_padding=true", "critic.model.use_remove_padding=true is invalid"),
        ("actor_rollout_ref.model.lora_rank=8", "lora_rank=8 is invalid"),
        (f"{ULYSSES}=2", "=2 only splits sequences without padding. Set .*use_remove_padding to true"),
        (f"{REFERENCE}=2", "ref.ulysses_sequence_parallel_size=2 is invalid: .*[.] Set it to .*actor.*=1$"),
        ("critic.ulysses_sequence_parallel_size=2", "critic.ulysses_sequence_parallel_size=2 is invalid"),
        ("+actor_rollout_ref.actor.recompute_old_log_prob=false", "recompute_old_log_prob=false is invalid"),
        ("actor_rollout_ref.actor.optim.warmup_style=linear", "warmup_style=linear is invalid"),
        ("actor_rollout_ref.rollout.n=1", "rollout.n=1 is invalid: algorithm.adv_estimator=grpo compares"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=3", "8 dies do not divide into whole rollout instances"),
        ("trainer.device=cuda", "trainer.device=cuda is invalid: it should be 'npu'"),
        ("data.train_batch_size=100", "data.train_batch_size=100 does not divide among 8 dies"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=24", "=24 does not divide the 40 sequences"),
        ("+trainer.savefreq=5", "unknown key trainer.savefreq, .*did you mean trainer.save_freq"),
    ],
)
def test_invalid_job_rejected_in_one_sentence(override, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        check_configuration(compose(NAME, [MODEL, override]))
    assert "\n" not in str(caught.value)


STEPS = "trainer.total_training_steps=2"


def test_dapo_is_a_recipe_on_fsdp_too():
    numbers = {
        "algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc",
        "reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 32,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28, "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    }  # fmt: skip
    config, without = plain("+recipe=dapo", STEPS), plain()
    for key, value in numbers.items():
        found, other = (reduce(getitem, key.split("."), each) for each in (config, without))
        assert found == value and (other != value or key.endswith((".len", "loss_agg_mode"))), key
    chosen = check_configuration(config)
    assert chosen.filter_groups and chosen.overlong_penalty and not check_configuration(without).filter_groups


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.total_training_steps=null", "enable=True needs trainer.total_training_steps"),
        ("reward_model.launch_reward_fn_async=true", "launch_reward_fn_async=True computes them after"),
        ("reward_model.overlong_buffer.len=129", "len=129 is invalid: an answer has 128 tokens"),
        ("algorithm.filter_groups.metrics=acc", "unknown key algorithm.filter_groups.metrics, .*filter_groups.metric"),
    ],
)
def test_settings_incompatible_with_dapo_rejected(override, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        check_configuration(compose(NAME, [MODEL, "+recipe=dapo", STEPS, f"++{override}"]))
    assert "\n" not in str(caught.value)


FSDP2 = "actor_rollout_ref.actor.strategy=fsdp2"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("actor_rollout_ref.actor.use_torch_compile=true", "use_torch_compile=true compiles .*[.] Set it to false"),
        (
            f"{ULYSSES}=3",
            "8 dies do not divide into whole groups of .*ulysses_sequence_parallel_size=3, .*a divisor of 8",
        ),
        (GAE, "ulysses_sequence_parallel_size=4 is not tested with a critic .*. Set it to 1"),
        # 128 prompts x 5 answers in two updates of 64 prompts: each of the two groups of dies has 160 sequences.
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64", "=64 does not divide the 160 sequences"),
    ],
)
def test_dies_that_share_sequences_are_checked(override, says):
    sharing = (MODEL, UNPADDED, f"{ULYSSES}=4")
    check_configuration(compose(NAME, [*sharing, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32"]))
    with pytest.raises(ConfigurationError, match=says) as caught:
        check_configuration(compose(NAME, [*sharing, override]))
    assert "\n" not in str(caught.value)


def test_fsdp2_is_one_key_for_all_models():
    for overrides in ([], [GAE]):
        check_configuration(compose(NAME, [MODEL, FSDP2, *overrides]))
        config = plain(FSDP2, *overrides)
        strategies = [config["critic"], *(config["actor_rollout_ref"][name] for name in ("actor", "ref"))]
        assert {node["strategy"] for node in strategies} == {"fsdp2"} and backend_of(config) == "fsdp"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("actor_rollout_ref.ref.strategy=fsdp", "ref.strategy=fsdp is invalid: .* Set it to .*strategy=fsdp2"),
        ("critic.strategy=fsdp", "critic.strategy=fsdp is invalid: .* Set it to .*actor.strategy=fsdp2$"),
        ("actor_rollout_ref.actor.fsdp_config.offload_policy=true", "offload_policy=true is invalid"),
        ("actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params=1", "=1 is read only by strategy fsdp, .*."),
        (
            "+critic.model.fsdp_config.wrap_policy.disable=true",
            "critic.*wrap_policy.disable=true is read only by strategy",
        ),
        ("+actor_rollout_ref.ref.fsdp_config.mixed_precision={buffer_dtype: bf16}", "ref.*buffer_dtype=bf16 is read"),
    ],
)
def test_keys_unused_by_fsdp2_reported_in_one_sentence(override, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        check_configuration(compose(NAME, [MODEL, FSDP2, GAE, override]))
    assert "\n" not in str(caught.value)


def test_a_critic_begins_as_the_actor_and_with_its_micro_batches():
    check_configuration(compose(NAME, [MODEL, GAE, "actor_rollout_ref.rollout.n=1", "trainer.n_gpus_per_node=2",
                                       "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"]))  # fmt: skip
    check_configuration(compose(NAME, [MODEL, GAE, "trainer.critic_warmup=2", "algorithm.overlong_filtering=true"]))
    critic = plain(GAE)["critic"]
    assert critic["model"]["path"] == "/weights" and critic["ppo_micro_batch_size_per_gpu"] == 20
    assert critic["forward_micro_batch_size_per_gpu"] == 20


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("critic.model.path=null", "critic.model.path is not set. Set it to a folder"),
        ("critic.ppo_micro_batch_size_per_gpu=24", "critic.ppo_micro_batch_size_per_gpu=24 does not divide the 40"),
        ("critic.ppo_micro_batch_size_per_gpu=null", "critic.ppo_micro_batch_size_per_gpu=None does not divide the 40"),
        ("critic.ppo_micro_batch_size=8", "ppo_micro_batch_size=8 is invalid: .*set ppo_micro_batch_size_per_gpu"),
        ("critic.forward_micro_batch_size=8", "=8 is invalid: .*set forward_micro_batch_size_per_gpu"),
        ("critic.ppo_mini_batch_size=48", "not a multiple of critic.ppo_mini_batch_size=48"),
        ("critic.ppo_mini_batch_size=1", "=1 prompts x 5 responses do not divide among 8 training replicas"),
        ("critic.rollout_n=4", "critic.rollout_n=4 is invalid: .* Set it to actor_rollout_ref.rollout.n=5$"),
        ("critic.strategy=fsdp2", "critic.strategy=fsdp2 is invalid: .* Set it to .*strategy=fsdp$"),
        ("critic.model.fsdp_config.fsdp_size=2", "critic.model.fsdp_config.fsdp_size=2 is invalid"),
        ("critic.model.lora_rank=8", "critic.model.lora_rank=8 is invalid"),
        ("critic.optim.min_lr_ratio=0.1", "min_lr_ratio=0.1 is invalid: .*reads none"),
        ("+critic.optim.lrr=0.1", "unknown key critic.optim.lrr, .*did you mean critic.optim.lr"),
        (
            "critic.checkpoint.contents=[model]",
            "critic.checkpoint.contents=.* is invalid: a checkpoint has other contents",
        ),
    ],
)
def test_a_critic_that_cannot_run_is_one_sentence(override, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        check_configuration(compose(NAME, [MODEL, GAE, override]))
    assert "\n" not in str(caught.value)


def test_a_token_limit_below_a_sequence_rejected_of_a_critic():
    dynamic = ("critic.use_dynamic_bsz=true", "critic.ppo_max_token_len_per_gpu=639")
    with pytest.raises(ConfigurationError, match="ppo_max_token_len_per_gpu=639 is less than the 640 tokens"):
        check_configuration(compose(NAME, [MODEL, GAE, *dynamic]))


def test_a_critic_of_another_vocabulary_rejected(tmp_path):
    for name, size in (("actor", 100), ("critic", 101)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SMALLEST | {"vocab_size": size}))
    paths = [f"actor_rollout_ref.model.path={tmp_path}/actor", f"critic.model.path={tmp_path}/critic"]
    with pytest.raises(
        ConfigurationError, match="is invalid: its vocabulary is 101, but the critic reads the actor's tokens with 100"
    ):
        check_configuration(compose(NAME, [*paths, GAE]))
    check_configuration(compose(NAME, paths))  # no critic is read


LIMIT = "max_token_len_per_gpu"


@pytest.mark.parametrize(
    ("group", "switch", "limit"),
    [
        ("actor", "use_dynamic_bsz", f"ppo_{LIMIT}"),
        ("rollout", "log_prob_use_dynamic_bsz", f"log_prob_{LIMIT}"),
        ("ref", "log_prob_use_dynamic_bsz", f"log_prob_{LIMIT}"),
    ],
)
def test_token_limit_below_a_sequence_is_rejected(group, switch, limit):
    """verl's splitter would assert this in the first update, for sequences of 4,096 tokens."""
    lengths = ["data.max_prompt_length=1024", "data.max_response_length=3072", UNPADDED]
    key = f"actor_rollout_ref.{group}.{limit}"

    def check(tokens, on="true", *more):
        dynamic = [f"actor_rollout_ref.{group}.{switch}={on}", f"{key}={tokens}"]
        check_configuration(compose(NAME, [MODEL, *lengths, *dynamic, *more]))

    with pytest.raises(
        ConfigurationError, match=f"{key}=3072 is less than the 4096 tokens .*Set it to at least 4096, or"
    ):
        check(3072)
    check(4096)
    check(3072, "false")
    shared = (f"{ULYSSES}=2", "actor_rollout_ref.ref.ulysses_sequence_parallel_size=2")
    check(2048, "true", *shared)
    with pytest.raises(ConfigurationError, match="=2047 .* on 2 dies that share a sequence. Set it to at least 2048"):
        check(2047, "true", *shared)


def test_heads_that_do_not_divide_rejected(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALLEST))
    overrides = [f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.rollout.tensor_model_parallel_size=4"]
    with pytest.raises(ConfigurationError, match="=4 does not divide the model's 14 attention heads"):
        check_configuration(compose(NAME, overrides))
    with pytest.raises(ConfigurationError, match="ulysses_sequence_parallel_size=4 does not divide the model's 14"):
        check_configuration(compose(NAME, [overrides[0], UNPADDED, f"{ULYSSES}=4"]))


TWELVE_DIES = [
    "trainer.n_gpus_per_node=12", "data.train_batch_size=144", "actor_rollout_ref.actor.ppo_mini_batch_size=72",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10",
]  # fmt: skip


@pytest.mark.parametrize("key", ["actor_rollout_ref.rollout.tensor_model_parallel_size", ULYSSES])
def test_heads_of_key_and_value_are_divided_or_repeated(key):
    """vLLM and verl assert this in their workers; the check reports it before they start."""

    def check(heads, size):
        widths = {"head_dim": 64, "intermediate_size": 4608, "vocab_size": 151936 * 3}  # for 3, 6 and 12 dies
        model = SMALLEST | widths | {"num_attention_heads": 12, "num_key_value_heads": heads}
        check_configuration(compose(NAME, [MODEL, UNPADDED, *TWELVE_DIES, f"{key}={size}"]), model)

    for heads, size in ((4, 2), (4, 12)):
        check(heads, size)
    for heads, size in ((4, 3), (4, 6)):
        says = rf"{key}={size} neither divides the model's {heads} key-value heads nor is a multiple of them; "
        with pytest.raises(ConfigurationError, match=says) as caught:
            check(heads, size)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "actor_rollout_ref.actor.megatron.seed=1",
            "is not in this configuration and belongs to Megatron. Remove it",
        ),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=fp32", "belongs to FSDP[.] .*write [+]actor_rollout_ref"),
        ("trainer.savefreq=1", "unknown key trainer.savefreq"),
    ],
)
def test_a_key_of_the_other_back_end_is_named(override, says, capsys):
    import re

    assert main(["--config-name", NAME, MODEL, override, "--check"]) == 2
    assert re.search(says, capsys.readouterr().err)
