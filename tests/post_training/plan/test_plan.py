"""Job plans: memory and placement for the cluster, reported problems, and the command."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from post_training.models.families import families, sizes_of
from post_training.plan.device import Rank, _shares, device_memory
from post_training.plan.job import _chunks_prompts, read_job, rollout_placement_of
from post_training.plan.outside_torch import OutsideTorch, communicators
from post_training.plan.report import Machine, describe, make_job_plan
from tests.scripts.cluster_files import ROOT, load_script
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose

MODEL = Path(__file__).with_name("deepseek_v3_config.json")
DIE = 61 << 30


@cache
def job(name: str, *overrides: str, swaps: bool = True):
    config = compose(f"deepseek_v3_256die_{name}", ["actor_rollout_ref.model.path=/m", *overrides])
    return read_job(OmegaConf.to_container(config, resolve=True), json.loads(MODEL.read_text()), swaps)


@pytest.mark.parametrize(("name", "weights", "sequences"), [("random_init", 25.8, 87), ("true_weight", 30.9, 70)])
def test_the_cluster_jobs_have_their_known_shape(name, weights, sequences):
    memory = device_memory(job(name), DIE, staging=2 << 30)
    assert memory.weights_rollout / 1e9 == pytest.approx(weights, abs=0.05)
    assert memory.weights_training / 1e9 == pytest.approx(6.77, abs=0.01)
    assert memory.kv_tokens // 4096 == sequences
    # The engine fills its share of the die; the alignment of the cache comes on top.
    assert memory.phases["rollout"] == pytest.approx(0.8 * DIE, rel=0.02)


def test_more_instances_leave_less_for_the_cache():
    one, two = (device_memory(job(name), DIE, 0) for name in ("random_init", "true_weight"))
    token = 61 * 576 * 2
    lost = (one.kv_tokens - two.kv_tokens) * token
    # Each cache is rounded down to whole blocks of 128 tokens.
    assert lost == pytest.approx(two.weights_rollout - one.weights_rollout, abs=128 * token)


def test_staging_is_there_in_the_reshard_alone():
    without, staging = device_memory(job("true_weight"), DIE, 0), 5 << 30
    phases = device_memory(job("true_weight"), DIE, staging).phases
    assert phases == without.phases | {"reshard": without.phases["reshard"] + staging}


def test_the_optimizer_needs_the_host():
    kept, swapped = (device_memory(job("random_init", swaps=swaps), DIE, 0) for swaps in (False, True))
    assert kept.optimizer == swapped.optimizer
    # Experts have no replica to share optimizer state with, so each element costs a rank 12 bytes.
    assert kept.optimizer == pytest.approx(12 * (2818572288 + (3386509312 - 2818572288) // 8), rel=1e-6)
    assert kept.phases["update"] > DIE > swapped.phases["update"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_optimizer_has_what_adamw_keeps_of_its_share(precision):
    """Megatron gives AdamW float32 copies of bfloat16 weights, or the weights themselves if they are float32.
    Replicas share the state of dense weights, and replicas with the same experts share theirs."""
    weights = torch.ones(64, dtype=getattr(torch, precision))
    main = torch.nn.Parameter(weights if precision == "float32" else weights.float())
    main.grad, optimizer = torch.ones(64), torch.optim.AdamW([main])
    optimizer.step()
    kept = [each for each in optimizer.state[main].values() if each.numel() == 64]
    kept += [main] if main.data_ptr() != weights.data_ptr() else []
    planned = job("true_weight", f"actor_rollout_ref.overlay.precision={precision}")
    train, shares = planned.train, []
    for rank in range(0, train.world_size, train.world_size // train.pp):
        shards = planned.table.megatron(train, rank)
        dense, experts = (
            sum(prod(each.extents) for each in shards if (".mlp.experts." in each.hf_name) is of_experts)
            for of_experts in (False, True)
        )
        shares.append(dense / train.dp + experts / (train.dp / train.ep))
    memory = device_memory(planned, DIE, 0)
    assert memory.optimizer == pytest.approx(max(shares) * sum(each.nbytes for each in kept) / 64, rel=1e-6)


def test_the_update_follows_the_number_of_layers_that_the_key_recomputes():
    """The peaks include memory outside of tensors, and match docs/cluster.md."""
    key = "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_num_layers"
    beside, sizes = OutsideTorch(hccl_buffer=300 << 20, cann=117 << 20, p2p_buffer=20 << 20), []
    for layers in (8, 4, 1):
        memory = device_memory(job("true_weight", f"{key}={layers}"), DIE, 0, beside)
        sizes.append(f"{(memory.phases['update'] + memory.outside) / 1e9:.2f}")
    assert sizes == ["28.17", "43.08", "54.76"]
    for guide in ("cluster.md", "cluster.zh.md"):
        text = (ROOT / "docs" / guide).read_text()
        assert all(re.search(rf"\b{re.escape(size)}\b", text) for size in sizes)


def test_what_the_engine_holds_beside_weights_and_cache_follows_its_scheduler():
    chunked = scaled_plan().job
    whole = dataclasses.replace(chunked, chunks_prompts=False)
    assert chunked.chunks_prompts
    scheduler = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.ascend_scheduler_config"
    assert not job("random_init", f"{scheduler}.enable_chunked_prefill=false").chunks_prompts
    assert job("random_init", f"{scheduler}.enabled=false").chunks_prompts
    one, other = (device_memory(each, DIE, 0).phases["idle"] for each in (chunked, whole))
    # A byte mask, and rows of 576 two-byte elements: 4 blocks of 128 tokens for each of 8 sequences.
    assert one - other == 2048 * 2048 + 4 * 128 * 8 * 576 * 2
    # Rows for eight full sequences, but at most 128 * 1024.
    for tokens, rows in ((8192, 8 * 8192), (32768, 128 * 1024)):
        one, other = (
            device_memory(dataclasses.replace(each, sequence_tokens=tokens), DIE, 0).phases["idle"]
            for each in (chunked, whole)
        )
        assert one - other == 2048 * 2048 + rows * 576 * 2


@cache
def scaled_plan(*overrides: str):
    """Plan the full model on 8 dies of unknown size."""
    layers = "actor_rollout_ref.actor.megatron.override_transformer_config.num_layer_list=[31,30]"
    return make_job_plan(job("random_init", "+scale=emulated_8_dies", layers, *overrides), Machine(1 << 50))


def test_misfit_named_with_a_remedy():
    assert scaled_plan().problems() == []
    plan = dataclasses.replace(scaled_plan(), machine=Machine(1 << 30, host=1 << 20, disk=1 << 10), checkpoint=1 << 20)
    named = [problem.partition(":")[0] for problem in plan.problems()]
    assert named == ["idle", "reshard", "rollout", "ref", "update", "host", "disk"]
    assert "lower actor_rollout_ref.rollout.gpu_memory_utilization" in plan.problems()[2]


def test_a_cache_that_is_too_small_is_named():
    """One full sequence has to fit; more is unnecessary, as concurrent sequences seldom all reach the limit."""

    def with_tokens(tokens: int):
        return dataclasses.replace(scaled_plan(), device=dataclasses.replace(scaled_plan().device, kv_tokens=tokens))

    (problem,) = with_tokens(0).problems()
    assert "room for 0 tokens, but one sequence may have 26" in problem and not with_tokens(0).remarks()
    assert not with_tokens(128).problems()
    (remark,) = with_tokens(128).remarks()
    assert "room for 128 of the 208 tokens of 8 full sequences" in remark
    assert not with_tokens(208).remarks()


def test_communicators_take_their_buffers_twice_and_some_before_the_cache_is_measured():
    found = communicators(job("true_weight"))
    assert {each.name: each.ranks for each in found if not each.early} == {
        "training: tensors": 4, "training: stages": 8, "training: gradients": 8, "training: experts": 32,
        "training: one neighbour in stages": 2, "training: other neighbour in stages": 2,
    }  # fmt: skip
    assert sorted(each.ranks for each in found if each.early) == [2, 64, 128, 128, 256]
    outside = OutsideTorch(hccl_buffer=300 << 20, cann=100 << 20, p2p_buffer=20 << 20)
    assert outside.at_most(job("true_weight")) == (9 * 600 + 2 * 40 + 100) << 20
    bare, taken = (device_memory(job("true_weight"), DIE, 0, each) for each in (OutsideTorch(), outside))
    assert (bare.outside, taken.outside) == (0, (9 * 600 + 2 * 40 + 100) << 20)
    # Five of them and CANN's part are already taken when vLLM-Ascend measures what is left of its share.
    lost = (bare.kv_tokens - taken.kv_tokens) * 61 * 576 * 2
    assert lost == pytest.approx((5 * 600 + 100) << 20, abs=128 * 61 * 576 * 2)
    # The tensors fit; the memory outside of tensors does not.
    plan = dataclasses.replace(scaled_plan(), device=dataclasses.replace(scaled_plan().device, outside=1 << 50))
    assert len(plan.problems()) == 5


def test_a_critic_needs_the_die_in_its_own_phases_and_the_host_in_the_others():
    alone, with_critic = job("true_weight"), job("true_weight", "algorithm.adv_estimator=gae")
    without, found = device_memory(alone, DIE, 0), device_memory(with_critic, DIE, 0)
    assert {name: size for name, size in found.phases.items() if name in without.phases} == without.phases
    assert set(found.phases) - set(without.phases) == {"values", "update_critic"}
    assert found.host - without.host == found.critic_weights + found.critic_optimizer
    # The middle stages hold the most, and have neither an embedding nor an output layer.
    assert found.critic_weights == found.weights_training and found.critic_optimizer == found.optimizer
    assert found.phases["update_critic"] == without.phases["update"]
    values = dict(json.loads(MODEL.read_text()))
    elements = sum(prod(shape) for shape in with_critic.critic.table.shapes.values())
    less = values["hidden_size"] * values["vocab_size"] - values["hidden_size"] - 1
    assert sum(prod(shape) for shape in alone.table.shapes.values()) - elements == less
    with pytest.raises(ValueError, match="critic.model.path=/other is invalid: the plan supports one model"):
        job("true_weight", "algorithm.adv_estimator=gae", "critic.model.path=/other")


def test_what_is_saved_and_what_the_host_holds():
    saving = scaled_plan()
    plan = make_job_plan(dataclasses.replace(saving.job, saves_every=0), saving.machine)
    assert plan.checkpoint == 0 and "no checkpoint is written" in describe(plan)
    elements = plan.weights_on_disk // 2
    # Main parameters and Adam's two moments, in float32.
    assert saving.checkpoint == elements * (4 + 8) and saving.checkpoints == 3 * saving.checkpoint
    assert "a checkpoint every 20 steps" in describe(saving) and "GB for 3 at a time" in describe(saving)
    assert "writing one" not in describe(saving)
    keeping_all = dataclasses.replace(saving, job=dataclasses.replace(saving.job, keeps=0))
    assert keeping_all.checkpoints == keeping_all.checkpoint and "all of them stay" in describe(keeping_all)
    assert plan.host.away == 8 * plan.device.host
    # Ray's default: 30% of the memory, at most 200 GB.
    assert plan.host.objects == 200 * 10**9
    small = make_job_plan(plan.job, Machine(1 << 50, host=10**11))
    assert small.host.objects == 3 * 10**10 and plan.host.processes == 12 * 10**9
    assert small.host.total == small.host.away + 3 * 10**10 + 12 * 10**9
    assert [problem.partition(":")[0] for problem in small.problems()] == ["host"]


def test_the_engine_takes_vllms_number_of_sequences_where_none_is_given():
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs"
    graph = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.torchair_graph_config.graph_batch_sizes=[8]"
    assert job("random_init", f"{key}=48").engine_sequences == 48
    assert job("random_init", f"~{key}", graph).engine_sequences == 256


@pytest.mark.parametrize(
    ("scheduler", "cuts"),
    [
        ({}, True),
        ({"enabled": False, "enable_chunked_prefill": False}, True),
        ({"enabled": True}, False),
        ({"enabled": True, "enable_chunked_prefill": True}, True),
    ],
)
def test_vllms_own_scheduler_always_cuts_prompts(scheduler, cuts):
    assert _chunks_prompts({"additional_config": {"ascend_scheduler_config": scheduler}}) is cuts


def test_the_output_layer_has_no_size_of_its_own_beside_tensor_parallelism():
    vllm = {"additional_config": {"lmhead_tp_size": 4}}
    sizes = [
        rollout_placement_of({"tensor_model_parallel_size": tp, "engine_kwargs": {"vllm": vllm}}, 4, 8).lm_head_size
        for tp in (1, 2)
    ]
    assert sizes == [4, 2]


def test_the_optimizer_has_its_share_of_the_replicas_that_hold_the_same_experts():
    """With 8 replicas and EP2, 4 replicas hold the same experts."""
    at_eight = SimpleNamespace(train=SimpleNamespace(dp=8, ep=2))
    assert _shares(at_eight, Rank(dense=80, experts=80)) == (10, 20)


@pytest.mark.parametrize("graph", [None, {"enabled": True}, {"enabled": True, "enable_multistream_moe": True}])
@pytest.mark.parametrize("prefill", [None, False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_rollout_is_placed_as_the_engine_places_it(graph, prefill, tp, monkeypatch):
    """vLLM-Ascend's own class and our reader of a running engine agree on the same additional_config."""
    import torch.distributed as dist
    from vllm.distributed import parallel_state

    # isort: split
    import vllm_ascend.ascend_config as ascend  # a circular import: vllm loads the platform, which imports this module

    from post_training.layouts.placements import rollout_placement

    additional = {"lmhead_tp_size": 2} if tp == 1 else {}
    additional |= {} if graph is None else {"torchair_graph_config": graph}
    additional |= {} if prefill is None else {"enable_prefill_optimizations": prefill}
    read = ascend.AscendConfig(SimpleNamespace(additional_config=additional))
    parallel = SimpleNamespace(
        tensor_parallel_size=tp, data_parallel_size=4 // tp, pipeline_parallel_size=1, enable_expert_parallel=True,
        lmhead_tp_size=2,
    )  # fmt: skip
    monkeypatch.setattr(ascend, "get_ascend_config", lambda: read)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for name in ("get_tp_group", "get_ep_group"):
        monkeypatch.setattr(parallel_state, name, lambda: SimpleNamespace(rank_in_group=0))
    running = rollout_placement(SimpleNamespace(parallel_config=parallel))
    node = {"tensor_model_parallel_size": tp, "engine_kwargs": {"vllm": {"additional_config": additional}}}
    planned = rollout_placement_of(node, 4, 8)
    assert planned.shared_expert_replicated == running.shared_expert_replicated
    assert dataclasses.replace(planned, lm_head_tp=planned.lm_head_size) == dataclasses.replace(
        running, lm_head_tp=running.lm_head_size
    )


def test_a_model_without_sizes_is_named():
    with pytest.raises(ValueError, match="for architecture Other. Known are DeepseekV3ForCausalLM"):
        sizes_of({"architectures": ["Other"]})
    with pytest.raises(ValueError, match="config.json of Qwen2ForCausalLM lacks 'num_hidden_layers'"):
        sizes_of({"architectures": ["Qwen2ForCausalLM"]})


def test_the_description_holds_the_arithmetic_of_batches():
    said = describe(scaled_plan())
    assert "8 prompts x 4 = 32 sequences of up to 26 tokens" in said and "everything fits" in said
    assert "an engine       8 sequences, 8 at a time" in said
    assert "a replica       16 sequences, 16 micro batches of 1" in said


@pytest.fixture
def tiny_model(tmp_path) -> Path:
    from rehearsal.tiny_model.architecture import tiny_config

    tiny_config(0, 1, 2).save_pretrained(tmp_path)
    return tmp_path / "config.json"


def test_the_command_ends_with_the_answer(tiny_model, capsys):
    main = load_script("scripts/plan.py").main
    line = ["--config-name", "deepseek_v3_256die_random_init", "--model", str(tiny_model), "+scale=emulated_8_dies"]
    emulated = [*line, "--emulated"]
    assert main([*emulated, "--die-memory", "1GiB"]) == 0 and "everything fits" in capsys.readouterr().out
    assert main([*emulated, "--die-memory", "1MiB"]) == 1 and "DOES NOT FIT: idle" in capsys.readouterr().out
    assert main([*line, "no.such.key=1"]) == 2 and "error: " in capsys.readouterr().err
    assert main([*line, "trainer.n_gpus_per_node=6"]) == 2 and "error: 6 dies" in capsys.readouterr().err
    # Real dies of that size have no room for HCCL's buffers.
    assert main([*line, "--die-memory", "1GiB"]) == 1
    assert "communicators of 2 x 300 MiB, 2 of 2 x 20 MiB, and 117 MiB of CANN" in capsys.readouterr().out


def printed_peaks(text: str) -> dict[str, float]:
    """Return the GB of each phase from a plan's table."""
    table = text.split("GB a die at the peak of a phase")[1].split("in each of them")[0].splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in table[1:] if re.fullmatch(r"  \w+ +[\d.]+", line)}


@pytest.mark.parametrize("emulated", [False, True])
def test_the_json_counts_what_the_table_counts(tiny_model, capsys, emulated):
    """Both count HCCL's buffers and CANN's memory, which real dies use outside of tensors and emulated ones do not."""
    main = load_script("scripts/plan.py").main
    line = ["--config-name", "deepseek_v3_256die_random_init", "--model", str(tiny_model), "+scale=emulated_8_dies"]
    line += ["--emulated"] if emulated else []
    assert main([*line, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(line) == 0
    printed = printed_peaks(capsys.readouterr().out)
    assert set(printed) == {"idle", "reshard", "rollout", "ref", "update"}
    assert printed == {phase: pytest.approx(size / 1e9, abs=6e-4) for phase, size in told["phases"].items()}
    buffers = told["communicators"] * told["hccl_buffer"] + told["p2p_communicators"] * told["p2p_buffer"]
    beside = 2 * buffers + told["cann"]
    assert told["outside"] == beside and (beside == 0) == emulated
    assert {phase: size - beside for phase, size in told["phases"].items()} == told["tensors"]
    assert told["die"] == 61 << 30 and all(size > 0 for size in told["tensors"].values())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1]", "is JSON with a list"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not readable JSON"),
        ("{}", "architectures=null"),
    ],
)
def test_a_model_that_is_none_gets_one_sentence(tmp_path, capsys, content, says):
    (tmp_path / "config.json").write_text(content)
    line = ["--config-name", "deepseek_v3_256die_true_weight", "--model", str(tmp_path / "config.json")]
    assert load_script("scripts/plan.py").main(line) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_a_cluster_file_without_a_size_of_buffers_is_named(tiny_model, tmp_path, capsys):
    line = ["--config-name", "deepseek_v3_256die_random_init", "--model", str(tiny_model), "+scale=emulated_8_dies"]
    (tmp_path / "c.env").write_text("HCCL_BUFFSIZE=much\n")
    main = load_script("scripts/plan.py").main
    assert (
        main([*line, "--cluster", str(tmp_path / "c.env")]) == 2
        and "c.env is invalid. Set it to MB, at least 1" in capsys.readouterr().err
    )
    assert main([*line, "--cluster", str(tmp_path)]) == 2 and "is invalid: not a file" in capsys.readouterr().err
    (tmp_path / "c.env").write_text("NODES=1\n")
    main([*line, "--cluster", str(tmp_path / "c.env")])
    assert "2 x 200 MiB" in capsys.readouterr().out


QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip


def test_a_dense_model_has_a_plan_too():
    """Plan Qwen2.5-0.5B at its published size on the scaled job's dies."""
    layers = "actor_rollout_ref.actor.megatron.override_transformer_config.num_layer_list=[12,12]"
    config = compose(
        "deepseek_v3_256die_random_init", ["actor_rollout_ref.model.path=/m", "+scale=emulated_8_dies", layers]
    )
    plan = make_job_plan(read_job(OmegaConf.to_container(config, resolve=True), QWEN2), Machine(1 << 36))
    assert plan.weights_on_disk == 494_032_768 * 2
    # Keys and values of one of two heads, 64 wide, in 24 layers, in bfloat16.
    assert plan.device.kv_tokens == 64 * 128
    assert plan.device.kv_cache == 64 * 128 * 24 * 2 * 64 * 2 + 2 * 24 * 2 * 1024 * 1024 * 2
    assert {each.name for each in communicators(plan.job)}.isdisjoint({"training: experts", "rollout: experts"})
    assert plan.problems() == [] and "everything fits" in describe(plan)


TRAINING = "actor_rollout_ref.actor.megatron"
STAGES = f"{TRAINING}.override_transformer_config.num_layer_list"
ONE_NODE = [
    "trainer.nnodes=1",
    f"{TRAINING}.tensor_model_parallel_size=4",
    f"{TRAINING}.pipeline_model_parallel_size=1",
]
# Parameters in the published files, the job, its overrides, and cached elements per token on a die: keys and values of
# the die's share of the 8 or 4 heads, each 128 wide, in all layers.
QWEN3 = {
    "qwen3-8b": (8_190_735_360, "qwen2_5_32b_dapo", ONE_NODE, 2 * 2 * 128 * 36),
    "qwen3-32b": (32_762_123_264, "qwen2_5_32b_dapo", [], 2 * 2 * 128 * 64),
    "qwen3-30b-a3b": (
        30_532_122_624, "deepseek_v3_256die_true_weight", ["+graph=off", f"{STAGES}=[6,6,6,6,6,6,6,6]"],
        2 * 2 * 128 * 48,
    ),
    "qwen3-235b-a22b": (
        235_093_634_560, "deepseek_v3_256die_true_weight", ["+graph=off", f"{STAGES}=[12,12,12,12,12,12,11,11]"],
        2 * 2 * 128 * 94,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", QWEN3)
def test_published_qwen3_models_are_checked_and_planned(name):
    parameters, configuration, overrides, token = QWEN3[name]
    family = next(each for each in families() if name in each.published)
    named = {"architectures": [family.architecture], "model_type": family.model_types[0]}
    model = {**named, "max_position_embeddings": 40960, **family.published[name]}
    config = compose(configuration, ["actor_rollout_ref.model.path=/m", *overrides])
    check_configuration(config, model)
    plan = make_job_plan(read_job(OmegaConf.to_container(config, resolve=True), model), Machine(DIE))
    assert plan.weights_on_disk == 2 * parameters
    assert plan.device.kv_cache == pytest.approx(plan.device.kv_tokens * token * 2, rel=0.02)
    experts = {each.name for each in communicators(plan.job)} & {"training: experts", "rollout: experts"}
    assert len(experts) == (2 if "num_experts" in model else 0)
    assert plan.problems() == [] and "everything fits" in describe(plan)


def test_micro_batches_by_tokens_are_planned_for_with_their_limit():
    limit = ["actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8193"]
    fixed, limited = job("random_init"), job("random_init", *limit)
    assert fixed.update_tokens is None and limited.update_tokens == 8193
    assert (limited.micro_update, limited.micro_reference, limited.sequence_tokens) == (3, 3, 4096)
