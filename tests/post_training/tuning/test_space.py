"""Reading search spaces from their files, around a configuration, and rejecting invalid ones."""

import optuna
import pytest

from post_training.tuning.space import (
    Choice,
    Range,
    SpaceError,
    algorithm_space,
    as_text,
    overrides,
    read_space,
    speed_space,
)

SPACE = """
a.size: [1, 2, 4]
a.share: {low: 0.5, high: 0.9, step: 0.1}
a.lr: {low: 1e-6, high: 1e-4, log: true}
layout:
  - {tp: 2, stages: [2, 1]}
  - {tp: 1, stages: null}
"""


def written(folder, text):
    file = folder / "space.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_space_file_round_trips(tmp_path):
    space = read_space(written(tmp_path, SPACE))
    assert space == (
        Choice("a.size", ({"a.size": 1}, {"a.size": 2}, {"a.size": 4})),
        Range("a.share", 0.5, 0.9, 0.1),
        Range("a.lr", 1e-6, 1e-4, log=True),
        Choice("layout", ({"tp": 2, "stages": [2, 1]}, {"tp": 1, "stages": None})),
    )
    assert read_space(written(tmp_path, as_text(space))) == space


def test_proposals_lie_in_the_space_and_are_overrides():
    space = (Choice("layout", ({"tp": 2, "stages": [2, 1]},)), Range("lr", 1e-6, 1e-4, log=True), Range("n", 1, 4))
    study = optuna.create_study()
    for _ in range(20):
        trial = study.ask()
        settings = {key: value for each in space for key, value in each.suggest(trial).items()}
        assert 1e-6 <= settings["lr"] <= 1e-4 and settings["n"] in (1, 2, 3, 4)
        assert overrides(settings)[:2] == ["tp=2", "stages=[2,1]"]


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("", "must contain settings by key"),
        ("[1, 2]", "must contain settings by key"),
        ("a: {low: 1", "is not YAML"),
        ("a: 3", "a=3 is invalid. Set it to a list of values"),
        ("a: []", "a=[] is invalid. Set it to a list of values"),
        ("a: {low: 1, hi: 2}", "a has hi, but a range takes low, high, step, log"),
        ("a: {low: x, high: 2}", "Set low, high and step"),
        ("a: {low: 2, high: 1}", "a goes from 2 to 1 by None"),
        ("a: {low: 1, high: 2, step: 5}", "by 5. Set a low below high, and a step that fits"),
        ("a: {low: 0, high: 2, log: true}", "a has log, which needs a low above 0"),
        ("a: [{x: 1}, {y: 1}]", "a has options with different keys"),
        ("a: [1, 2, 1]", "a has an option twice"),
    ],
)
def test_invalid_space_rejected_in_one_sentence(tmp_path, text, sentence):
    with pytest.raises(SpaceError) as refused:
        read_space(written(tmp_path, text))
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(SpaceError, match="absent.yaml cannot be read"):
        read_space(tmp_path / "absent.yaml")


def config(**more):
    megatron = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    megatron["override_transformer_config"] = {"num_layer_list": [4, 3]}
    rollout = {"gpu_memory_utilization": 0.5, "tensor_model_parallel_size": 2, "engine_kwargs": {"vllm": {}}}
    actor = {"ppo_micro_batch_size_per_gpu": 2, "megatron": megatron, "optim": {"lr": 1e-5}, "clip_ratio": 0.2}
    actor |= {"use_kl_loss": True, "kl_loss_coef": 0.001}
    ref = {
        "log_prob_use_dynamic_bsz": True,
        "log_prob_max_token_len_per_gpu": 4096,
        "log_prob_micro_batch_size_per_gpu": 8,
    }
    node = {"actor": actor | more, "ref": ref, "rollout": rollout, "model": {}}
    return {"actor_rollout_ref": node, "trainer": {"nnodes": 1, "n_gpus_per_node": 8}}


def by_name(space):
    return {each.name.rpartition(".")[2]: each for each in space}


def test_speed_is_searched_around_what_is_configured():
    space = by_name(speed_space(config(), 7))
    sizes = [list(option.values()) for option in space["ppo_micro_batch_size_per_gpu"].options]
    assert sizes == [[1], [2], [4], [8]]
    assert "log_prob_max_token_len_per_gpu" in space and "log_prob_micro_batch_size_per_gpu" not in space
    assert space["max_num_seqs"].name.startswith("++"), "the configuration does not have the key"
    layouts = [list(option.values()) for option in space["layout"].options]
    assert [1, 1, [7]] in layouts and [2, 2, [4, 3]] in layouts and [1, 4, [2, 2, 2, 1]] in layouts
    assert all(8 % (tp * pp) == 0 and sum(stages) == 7 for tp, pp, stages in layouts)
    assert (
        space["layout"]
        .configured(config())
        .startswith("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 ")
    )


def test_experts_stay_spread_over_as_many_replicas_as_there_are():
    job = config()
    job["actor_rollout_ref"]["actor"]["megatron"]["expert_model_parallel_size"] = 2
    spread = [tuple(option.values()) for option in by_name(speed_space(job, 7))["layout"].options]
    assert (2, 2, [4, 3], 2) in spread and (4, 2, [4, 3], 1) in spread and (1, 1, [7], 2) in spread


def test_layouts_of_an_unknown_model_stay():
    assert "layout" not in by_name(speed_space(config(), None))


def test_the_algorithm_is_searched_around_what_is_configured():
    space = by_name(algorithm_space(config()))
    assert set(space) == {"lr", "kl_loss_coef", "clip_ratio"}
    assert (space["lr"].low, space["lr"].high, space["lr"].log) == (1e-6, pytest.approx(1e-4), True)
    assert space["kl_loss_coef"].high == pytest.approx(100 * space["kl_loss_coef"].low) and space["kl_loss_coef"].log
    assert space["clip_ratio"] == Range("actor_rollout_ref.actor.clip_ratio", 0.1, 0.3, 0.05)
    assert set(by_name(algorithm_space(config(use_kl_loss=False)))) == {"lr", "clip_ratio"}
    assert set(by_name(algorithm_space(config(kl_loss_coef=None)))) == {"lr", "clip_ratio"}


def test_the_whole_space_of_speed_is_what_its_rules_give():
    """Hand-computed: a quarter to four times the micro batch, memory shares, layouts of 8 dies, and rollout TP."""
    node = "actor_rollout_ref"
    tp, pp, stages = (
        f"{node}.actor.megatron.{name}"
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "override_transformer_config.num_layer_list",
        )
    )
    even = {1: [7], 2: [4, 3], 4: [2, 2, 2, 1]}
    pairs = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]  # 4 x 4 are more than 8 dies
    written = {each.name: each.written() for each in speed_space(config(), 7)}
    assert list(written.items()) == [
        (f"{node}.actor.ppo_micro_batch_size_per_gpu", [1, 2, 4, 8]),
        (f"{node}.ref.log_prob_max_token_len_per_gpu", [1024, 2048, 4096, 8192, 16384]),
        (f"{node}.rollout.gpu_memory_utilization", {"low": 0.4, "high": 0.9, "step": 0.1}),
        (f"++{node}.rollout.engine_kwargs.vllm.max_num_seqs", [128, 256, 512]),
        ("layout", [{tp: tensor, pp: stage, stages: even[stage]} for tensor, stage in pairs]),
        (f"{node}.rollout.tensor_model_parallel_size", [1, 2, 4]),
    ]


def test_the_space_of_speed_follows_the_job():
    """The job has 16 dies, 2 layers, EP4, token-based batches, block recomputation, and a key that is already set."""
    job = config(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=1000)
    node = job["actor_rollout_ref"]
    node["model"] = {
        "enable_gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {
            "activations_checkpoint_method": "block",
            "activations_checkpoint_num_layers": 4,
        },
    }
    node["rollout"]["engine_kwargs"]["vllm"] = {"max_num_seqs": 64, "num_gpu_blocks_override": 9}
    node["actor"]["megatron"] = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
    }
    job["trainer"]["nnodes"] = 2
    space = by_name(speed_space(job, 2))
    assert list(space) == [
        "ppo_max_token_len_per_gpu",
        "log_prob_max_token_len_per_gpu",
        "max_num_seqs",
        "activations_checkpoint_num_layers",
        "layout",
        "tensor_model_parallel_size",
    ]
    assert [
        option.popitem()[1] for option in space["ppo_max_token_len_per_gpu"].written() if isinstance(option, dict)
    ] == []
    assert space["ppo_max_token_len_per_gpu"].written() == [250, 500, 1000, 2000, 4000]
    assert space["max_num_seqs"].written() == [32, 64, 128] and not space["max_num_seqs"].name.startswith("+")
    recomputed = space["activations_checkpoint_num_layers"]
    assert (recomputed.low, recomputed.high, recomputed.step) == (1, 4, None)
    # No more stages than layers, and EP as wide as the replicas: 16 dies with TP4 x PP2 make 2.
    layouts = [tuple(option.values()) for option in space["layout"].options]
    assert layouts == [(1, 1, 4), (1, 2, 4), (2, 1, 4), (2, 2, 4), (4, 1, 4), (4, 2, 2)]
    for name, value in (("activations_checkpoint_num_layers", 1), ("activations_checkpoint_method", "uniform")):
        kwargs = node["model"]["gradient_checkpointing_kwargs"]
        kept = kwargs[name]
        kwargs[name] = value
        assert "activations_checkpoint_num_layers" not in by_name(speed_space(job, 2))
        kwargs[name] = kept
    node["actor"].pop("ppo_max_token_len_per_gpu")
    assert "ppo_max_token_len_per_gpu" not in by_name(speed_space(job, 2))


def test_configured_values_are_found_in_the_space():
    size = Choice("a.size", ({"a.size": 1}, {"a.size": 2}))
    both = Choice("layout", ({"tp": 2, "stages": [2, 1]}, {"tp": 1, "stages": None}))
    assert size.labels() == [1, 2] and size.first() == {"a.size": 1} and size.written() == [1, 2]
    assert both.labels() == ["tp=2 stages=[2,1]", "tp=1 stages=null"]
    assert both.first() == {"tp": 2, "stages": [2, 1]} and both.written() == [dict(each) for each in both.options]
    assert size.configured({"a": {"size": 2}}) == 2 and size.configured({"a": {"size": 3}}) is None
    assert Choice("++a.n", ({"++a.n": 5},)).configured({"a": {"n": 5}}) == 5
    assert both.configured({"tp": 1, "stages": None}) == "tp=1 stages=null"
    assert both.configured({"tp": 1, "stages": [2, 1]}) is None
    share = Range("++a.share", 0.5, 0.9, 0.1)
    found = [share.configured({"a": {"share": value}}) for value in (0.4, 0.5, 0.9, 0.91, "0.5", None)]
    assert found == [None, 0.5, 0.9, None, None, None] and share.first() == {"++a.share": 0.5}
    assert share.written() == {"low": 0.5, "high": 0.9, "step": 0.1}
    assert Range("lr", 1, 2, log=True).written() == {"low": 1, "high": 2, "log": True}


def test_numbers_of_a_range_have_its_kind_and_its_steps():
    fixed = optuna.trial.FixedTrial({"whole": 5, "part": 1 / 3, "mixed": 2.0})
    assert Range("whole", 1, 9, 2).suggest(fixed) == {"whole": 5}
    assert Range("part", 0.0, 1.0).suggest(fixed) == {"part": 0.333333}
    assert isinstance(Range("mixed", 1, 2.5).suggest(fixed)["mixed"], float)
    for whole, values in ((Range("n", 1, 9, 4), {1, 5, 9}), (Range("n", 1, 3), {1, 2, 3})):
        trials = (optuna.create_study().ask() for _ in range(40))
        assert {whole.suggest(trial)["n"] for trial in trials} == values


def test_the_bounds_of_a_range_are_taken_as_they_are(tmp_path):
    assert read_space(written(tmp_path, "a: {low: 1, high: 2, step: 1}")) == (Range("a", 1, 2, 1),)
    for text in ("a: {low: 1, high: 1}", "a: {low: 1, high: 2, step: 0}", "a: {low: true, high: 2}",
                 "a: {low: 1, high: 2, step: x}", "a: {low: 1, high: 2, step: 1, log: true}"):  # fmt: skip
        with pytest.raises(SpaceError):
            read_space(written(tmp_path, text))
