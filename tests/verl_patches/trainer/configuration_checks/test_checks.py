import json
from contextlib import nullcontext

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf

from rehearsal.tiny_model.architecture import TINY_MODELS
from verl_patches.trainer import main_ppo
from verl_patches.trainer.configuration_checks import (
    ConfigurationError,
    check_cluster_resources,
    check_configuration,
    describe_failure,
    required_ray_slots,
)
from verl_patches.trainer.configuration_checks.sizes import training_data_parallel_size
from verl_patches.trainer.main_ppo import compose, main

ADDITIONAL = "+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config"
GRAPH = (
    f"{ADDITIONAL}.torchair_graph_config.enabled=true",
    "actor_rollout_ref.rollout.enforce_eager=false",
    "actor_rollout_ref.rollout.free_cache_engine=false",
)
PRIVATE_FORMAT = f"{ADDITIONAL}.torchair_graph_config.enable_kv_nz=true"
SCHEDULER = f"{ADDITIONAL}.ascend_scheduler_config"
# In the format of Ray's memory monitor (src/ray/raylet of 2.x).
RAYS_MEMORY_MONITOR = (
    "Task was killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: ab) where the task "
    "(actor ID: cd) was running was 22.40GB / 23.47GB (0.954), which exceeds the memory usage threshold of 0.95. "
    "Refer to the documentation on how to address the out of memory issue."
)


def rehearsal(*overrides):
    return compose("rehearsal", overrides)


def test_the_rehearsal_configuration_passes():
    settings = check_configuration(rehearsal())
    assert settings.residency.enabled and not settings.recompute_old_log_prob


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["trainer.n_gpus_per_node=6"],
            "6 dies do not divide into whole training replicas: TP x PP x CP is 4",
        ),
        (
            ["actor_rollout_ref.rollout.tensor_model_parallel_size=3"],
            "do not divide into whole rollout instances of actor_rollout_ref.rollout.tensor_model_parallel_size=3",
        ),
        (["actor_rollout_ref.overlay.rollout.expert_parallel_size=3"], "=3 does not divide 4 dies into equal"),
        (
            [
                "trainer.n_gpus_per_node=12",
                "data.train_batch_size=48",
                "actor_rollout_ref.overlay.rollout.expert_parallel_size=3",
            ],
            "=3 does not divide 12 dies .* whole tensor-parallel groups of 2",
        ),
        (["data.train_batch_size=30"], "data.train_batch_size=30 does not divide among 4 dies"),
        (
            ["actor_rollout_ref.actor.ppo_mini_batch_size=24"],
            "data.train_batch_size=32 is not a multiple of actor_rollout_ref.actor.ppo_mini_batch_size=24",
        ),
        (
            ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=512"],
            "ppo_micro_batch_size_per_gpu=512 does not divide the 256 sequences",
        ),
        (["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null"], "per_gpu=None does not divide"),
        (
            ["actor_rollout_ref.actor.ppo_mini_batch_size=16"],
            "recompute_old_log_prob=False is exact only with one update per rollout batch, but .* into 2 updates; set",
        ),
        (["actor_rollout_ref.actor.ppo_epochs=2"], "one update per rollout batch, but .*ppo_epochs=2; set it to 1"),
        (["algorithm.use_kl_in_reward=true"], "use_kl_in_reward=True needs it before the update"),
        (["actor_rollout_ref.actor.megatron.grad_offload=true"], "grad_offload=True and .*would both move"),
        (
            [
                "actor_rollout_ref.overlay.residency.enabled=false",
                "actor_rollout_ref.overlay.checkpoint.write=background",
            ],
            "write=background writes .*residency.enabled=false[.] Set .*checkpoint.write to auto",
        ),
        (["actor_rollout_ref.ref.megatron.param_offload=true"], "ref.megatron.param_offload=True and .*would both"),
        (["actor_rollout_ref.rollout.temperature=0"], "temperature=0.0 is invalid: training has no such log-probs"),
        (["ray_init.num_cpus=5"], "ray_init.num_cpus=5 is too low .*Set it to at least 6"),
        (["actor_rollout_ref.actor.optim.min_lr_ratio=0.1"], "min_lr_ratio=0.1 has no effect with .*=constant"),
        ([*GRAPH, PRIVATE_FORMAT], "enable_kv_nz=True gives wrong tokens with chunked prefill"),
        (
            [*GRAPH, PRIVATE_FORMAT, f"{SCHEDULER}.enabled=true", f"{SCHEDULER}.enable_chunked_prefill=true"],
            "enable_kv_nz=True",
        ),
    ],
)
def test_invalid_configuration_rejected_in_one_sentence(overrides, says):
    with pytest.raises(ConfigurationError, match=says) as rejection:
        check_configuration(rehearsal(*overrides))
    assert "\n" not in str(rejection.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor_rollout_ref.actor.recompute_old_log_prob=true", "actor_rollout_ref.actor.ppo_epochs=2"],
        ["actor_rollout_ref.actor.recompute_old_log_prob=true", "actor_rollout_ref.actor.ppo_mini_batch_size=16"],
        ["actor_rollout_ref.overlay.residency.enabled=false", "actor_rollout_ref.actor.megatron.grad_offload=true"],
        ["ray_init.num_cpus=6"],
        ["trainer.save_freq=5"],
        [
            "trainer.save_freq=5",
            "trainer.n_gpus_per_node=8",
            "actor_rollout_ref.overlay.rollout.expert_parallel_size=8",
            "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
        ],
        [*GRAPH, PRIVATE_FORMAT, f"{SCHEDULER}.enabled=true"],
        [f"{SCHEDULER}.enabled=true", f"{SCHEDULER}.enable_chunked_prefill=true"],
        ["actor_rollout_ref.actor.optim.lr_warmup_steps=5"],
        [
            "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1",
            "actor_rollout_ref.actor.optim.warmup_style=linear",
        ],
        ["actor_rollout_ref.actor.optim.warmup_style=cosine", "actor_rollout_ref.actor.optim.min_lr_ratio=0.1"],
        ["trainer.n_gpus_per_node=8", "actor_rollout_ref.overlay.rollout.expert_parallel_size=8"],
        ["trainer.n_gpus_per_node=8", "actor_rollout_ref.overlay.rollout.expert_parallel_size=4"],
    ],
)
def test_the_same_values_run_where_they_are_sound(overrides):
    check_configuration(rehearsal(*overrides))


@pytest.mark.parametrize(
    ("options", "addresses", "rejected"),
    [
        ("expandable_segments:True", "reserved", True),
        ("expandable_segments:True", "released", False),
        ("expandable_segments:False", "reserved", False),
    ],
)
def test_reserved_addresses_do_not_go_with_expandable_segments(options, addresses, rejected, monkeypatch):
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", options)
    config = rehearsal(f"actor_rollout_ref.overlay.residency.rollout_addresses={addresses}")
    with pytest.raises(ConfigurationError, match="=reserved needs a memory pool") if rejected else nullcontext():
        check_configuration(config)


def test_a_larger_generation_batch_makes_several_updates():
    config = rehearsal("+data.gen_batch_size=64")
    with pytest.raises(ConfigurationError, match="splits the 64 prompts of a rollout batch into 2 updates"):
        check_configuration(config)


def test_slots_cover_workers_and_verls_own_actors():
    assert required_ray_slots(rehearsal("trainer.nnodes=2")) == 10


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.n_gpus_per_node=6"], "error: 6 dies do not divide"),
        (["actor_rollout_ref.overlay.residency.enable=true"], "enable"),
        (
            ["+actor_rollout_ref.overlay.residency.enable=true"],
            "error: unknown key actor_rollout_ref.overlay.residency.enable",
        ),
        (["no_such_key=1"], "no_such_key"),
    ],
)
def test_the_entry_point_ends_with_two_and_one_line(overrides, says, capsys):
    assert main(overrides) == 2
    printed = capsys.readouterr().err
    assert says in printed and printed.count("\n") == 1


def test_the_entry_point_prints_the_resolved_configuration(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--print-config", "data.seed=7"]) == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    assert printed.actor_rollout_ref.rollout.seed == 7
    assert printed.actor_rollout_ref.overlay.measure.output_dir == str(tmp_path / "outputs/rehearsal/manual")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ({"CPU": 6.0}, "Ray has 0 of the 4 NPU slots that this run needs; start Ray where the NPUs are visible"),
        ({"CPU": 5.0, "NPU": 4.0}, "Ray has 5 of the 6 CPU slots that this run needs; start Ray with more CPU slots"),
    ],
)
def test_a_ray_without_the_slots_rejected(resources, says):
    with pytest.raises(ConfigurationError, match=says):
        check_cluster_resources(rehearsal(), resources)
    check_cluster_resources(rehearsal(), {"CPU": 6.0, "NPU": 4.0, "memory": 1.0})


def test_paths_become_absolute(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--print-config"]) == 0
    reward = OmegaConf.create(capsys.readouterr().out).custom_reward_function.path
    assert reward.startswith("/") and reward.endswith("/verl_patches/utils/reward/rule_reward.py")


def test_data_in_another_shape_rejected_before_anything_starts(tmp_path, monkeypatch, capsys):
    raw = tmp_path / "raw.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["x"], "answer": ["#### 1"]}), raw)
    monkeypatch.setattr(main_ppo, "run", lambda config: pytest.fail("the run was started"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", **TINY_MODELS["deepseek_v3"]}))
    assert main([f"data.train_files={raw}", f"actor_rollout_ref.model.path={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {raw}: column data_source: it is missing") and error.count("\n") == 1


@pytest.mark.parametrize(
    "error, remedy, cause",
    [
        (RuntimeError("NPU out of memory. Tried to allocate 2 MiB"), "Give the dies more memory", "OOM"),
        (RuntimeError(RAYS_MEMORY_MONITOR), "ran out of host memory", "host_memory"),
        (ValueError("No available memory for the cache blocks. Try"), "KV cache", "bad_configuration"),
    ],
)
def test_known_failure_has_a_remedy_and_a_cause(error, remedy, cause):
    sentence, found = describe_failure(error)
    assert remedy in sentence and found == cause


def test_unknown_failure_is_its_last_line():
    assert describe_failure(RuntimeError("trace\nthe last line\n")) == ("the last line", None)
    assert describe_failure(KeyError()) == ("KeyError", None)


@pytest.mark.parametrize(
    ("overrides", "replicas"),
    [
        ([], 1),
        (["trainer.n_gpus_per_node=8"], 2),
        (["trainer.nnodes=3"], 3),
        (["trainer.n_gpus_per_node=8", "actor_rollout_ref.actor.megatron.context_parallel_size=2"], 1),
        (["trainer.n_gpus_per_node=8", "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1"], 4),
    ],
)
def test_replicas_are_the_dies_over_all_of_the_models_parallel_sizes(overrides, replicas):
    assert training_data_parallel_size(rehearsal(*overrides)) == replicas


def test_a_mini_batch_must_divide_among_the_replicas():
    """There are three replicas: 24 prompts divide among 12 dies, but a mini batch of 8 x 1 does not divide by 3."""
    three = [
        "trainer.n_gpus_per_node=12",
        "actor_rollout_ref.overlay.rollout.expert_parallel_size=12",
        "data.train_batch_size=24",
        "actor_rollout_ref.actor.recompute_old_log_prob=true",
        "actor_rollout_ref.rollout.n=1",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    ]
    with pytest.raises(
        ConfigurationError, match="a mini batch of 8 prompts x 1 responses does not divide among 3 train"
    ):
        check_configuration(rehearsal(*three, "actor_rollout_ref.actor.ppo_mini_batch_size=8"))
    check_configuration(rehearsal(*three, "actor_rollout_ref.actor.ppo_mini_batch_size=12"))
