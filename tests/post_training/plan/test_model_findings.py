"""Models that a job can use: each rule and its message, on the config.json of published models."""

import pytest

from post_training.plan.model_findings import ModelUse, model_findings
from tests.post_training.models.published_configs import PUBLISHED_CONFIGS, nested

V3 = PUBLISHED_CONFIGS["deepseek-ai/DeepSeek-V3, edited"]
QWEN = PUBLISHED_CONFIGS["Qwen/Qwen2.5-7B-Instruct"]
QWEN3 = PUBLISHED_CONFIGS["Qwen/Qwen3-8B"]
MOE = PUBLISHED_CONFIGS["Qwen/Qwen3-30B-A3B"]
VL = PUBLISHED_CONFIGS["Qwen/Qwen2.5-VL-7B-Instruct"]
PATH = "actor_rollout_ref.model.path"


def use(backend="megatron", dies=4, serves=True, rollout=None, spread=1, **megatron):
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1}
    actor = {"megatron": {**sizes, "override_transformer_config": {}, **megatron}} if backend == "megatron" else {}
    served = {
        "prompt_length": 1024, "response_length": 3072, "max_model_len": None, "tensor_model_parallel_size": 1,
        "enforce_eager": True, "engine_kwargs": {"vllm": None}, **(rollout or {}),
    }  # fmt: skip
    node = {"actor": actor, "rollout": served, "model": {}, "overlay": {"rollout": {"expert_parallel_size": spread}}}
    return ModelUse(node, backend, dies, serves)


def first(config, **job):
    return next(model_findings(config, use(**job)), None)


@pytest.mark.parametrize("config", [V3, QWEN, QWEN3, MOE])
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_published_model_passes_a_job_of_its_size(config, backend):
    assert first(config, backend=backend) is None


@pytest.mark.parametrize(
    ("config", "changes", "job", "says"),
    [
        (QWEN, {"architectures": None}, {}, "architectures=null of the model's config.json is invalid"),
        (QWEN, {"architectures": ["Qwen2ForCausalLM", "Other"]}, {}, "from the one architecture named there"),
        (QWEN, {"architectures": ["Qwen2Model"]}, {}, "no sharding spec for architecture Qwen2Model. Known are"),
        (QWEN, {"model_type": None}, {}, "model_type=null of the model's config.json is invalid"),
        (QWEN, {"hidden_size": "3584"}, {}, 'hidden_size="3584" of the model\'s config.json is invalid'),
        (QWEN, {"num_attention_heads": 0}, {}, "every Qwen2.5 has an integer above 0 there"),
        (QWEN, {"num_key_value_heads": None}, {}, "num_key_value_heads=null"),
        (QWEN, {"num_hidden_layers": True}, {}, "num_hidden_layers=true"),
        (QWEN3, {"attention_bias": True}, {}, "needs attention_bias=False"),
        (QWEN, {"hidden_act": "gelu"}, {}, 'hidden_act="gelu" of the model'),
        (QWEN, {"attention_dropout": 0.1}, {}, "supports attention dropout"),
        (MOE, {"mlp_only_layers": [0]}, {}, "mlp_only_layers=[0] of the model's config.json is invalid"),
        (MOE, {"tie_word_embeddings": True}, {}, "have separate weights"),
        (V3, {"scoring_func": "softmax"}, {}, "support only scoring_func=sigmoid"),
        (V3, {"rope_scaling": {"type": "linear", "factor": 2}}, {}, "Megatron's DeepSeek-V3 supports only yarn"),
        (V3, {"rope_scaling": {"type": "yarn", "factor": 2}}, {}, "a number for original_max_position_embeddings"),
        (MOE, {"rope_scaling": {"type": "yarn", "factor": 2}}, {}, "Megatron's Qwen3-MoE does not support it"),
        (QWEN, {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, {}, "Megatron's Qwen2.5 supports only linear"),
        (QWEN, {"max_position_embeddings": 4095}, {}, "have up to 4096 tokens"),
        (QWEN, {}, {"rollout": {"max_model_len": 40000}}, "have up to 40000 tokens"),
        (QWEN, {}, {"tensor_model_parallel_size": 7}, "does not divide the model's 4 key-value heads"),
        (QWEN, {}, {"expert_model_parallel_size": 2}, "spreads experts, but the model has none; set it to 1"),
        (QWEN, {}, {"spread": 4}, "expert_parallel_size=4 spreads experts, but the model has none"),
        (MOE, {}, {"expert_model_parallel_size": 3}, "the model's 128 experts on 3 ranks"),
        (MOE, {"num_experts_per_tok": 129}, {}, "moe_router_topk exceeds"),
        (V3, {}, {"dies": 64, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 31,
                  "override_transformer_config": {"num_layer_list": [3, 1, *[2] * 28, 1]}}, "all dense, but expert"),
        (QWEN, {"vocab_size": 152063}, {"tensor_model_parallel_size": 2}, "152063 cannot be divided by 2"),
        (QWEN, {}, {"rollout": {"enforce_eager": False,
                                "engine_kwargs": {"vllm": {"additional_config": {"torchair_graph_config":
                                                                                 {"enabled": True}}}}}},
         "torchair's graphs, which vLLM-Ascend has for DeepSeek-V3 and not for qwen2"),
    ],
)  # fmt: skip
def test_model_that_a_job_cannot_use_is_named(config, changes, job, says):
    found = first({**config, **changes}, **job)
    assert found is not None and says in found and "\n" not in found


def test_value_that_the_job_overrides_is_the_one_that_counts():
    """On Megatron, verl overrides values of config.json for training only."""
    job = use()
    job.node["model"]["override_config"] = {"model_config": {"num_nextn_predict_layers": 0}}
    assert list(model_findings(V3 | {"num_nextn_predict_layers": 1}, job)) == []


def test_positions_of_yarn_make_the_context_longer():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    scaled = QWEN | {"rope_scaling": yarn, "max_position_embeddings": 131072}  # required by rotary_findings
    longest = {"rollout": {"prompt_length": 1024, "response_length": 4 * 32768 - 1024}, "backend": "fsdp"}
    assert first(scaled, **longest) is None and "131072 tokens" in (first(QWEN, **longest) or "")
    longest["rollout"]["response_length"] += 1
    assert "131073 tokens" in (first(scaled, **longest) or "")


def test_critic_is_not_served():
    longest = {"rollout": {"prompt_length": 1024, "response_length": 40000}}
    assert first(QWEN, serves=False, **longest) is None and first(QWEN, **longest) is not None


FSDP = {"backend": "fsdp"}


@pytest.mark.parametrize("size", ["3B", "7B", "32B"])
@pytest.mark.parametrize("form", [dict, nested])
def test_multi_modal_model_passes_fsdp_in_both_forms(size, form):
    config = form(PUBLISHED_CONFIGS[f"Qwen/Qwen2.5-VL-{size}-Instruct"])
    assert first(config, **FSDP, rollout={"tensor_model_parallel_size": 4}) is None
    assert first(config) == (
        "actor_rollout_ref.actor.strategy=megatron is invalid: verl has no Megatron model for Qwen2.5-VL. Set it to "
        "fsdp, in a configuration with ppo_trainer and fsdp_on_npu such as qwen2_5_vl_7b_geo3k"
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vision_config": None}, "vision_config=null of the model's config.json is invalid"),
        ({"vision_config": {"depth": 32}}, "vision_config.hidden_size=null of the model's config.json is invalid"),
        ({"vision_config": VL["vision_config"] | {"depth": True}}, "vision_config.depth=true of the model's"),
        ({"vision_config": VL["vision_config"] | {"num_heads": 17}}, "each of its 17 heads needs rotary angles"),
        (
            {"vision_config": VL["vision_config"] | {"out_hidden_size": 2048}},
            "as wide as the decoder's hidden_size=3584",
        ),
        ({"vision_config": VL["vision_config"] | {"hidden_act": "gelu"}}, "only silu"),
        ({"rope_scaling": None}, "mrope_section must be three numbers that add up to 64"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "mrope_section must be three numbers"),
    ],
)
@pytest.mark.parametrize("form", [dict, nested])
def test_multi_modal_config_with_wrong_parts_rejected(changes, says, form):
    changed = form(VL)
    for name, value in changes.items():
        (changed["text_config"] if name != "vision_config" and form is nested else changed)[name] = value
    assert says in first(changed, **FSDP)


def test_tower_that_does_not_divide_rejected():
    job = {**FSDP, "dies": 8, "rollout": {"tensor_model_parallel_size": 8}}
    tall = VL | {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    tall |= {"vision_config": VL["vision_config"] | {"out_hidden_size": 4096}}
    said = first(tall, **job)
    assert said.startswith(
        "actor_rollout_ref.rollout.tensor_model_parallel_size=8 is invalid: visual.blocks.0.mlp.gate"
    )
    assert first(PUBLISHED_CONFIGS["Qwen/Qwen2.5-VL-32B-Instruct"], **job) is None


@pytest.mark.parametrize(
    ("group", "values", "says"),
    [
        ("model", {"use_remove_padding": True}, "model.use_remove_padding=true is invalid: sequences with images"),
        (
            "actor",
            {"ulysses_sequence_parallel_size": 2},
            "actor.ulysses_sequence_parallel_size=2 is invalid",
        ),
    ],
)
def test_images_without_padding_rejected(group, values, says):
    job = use(**FSDP)
    job.node[group].update(values)
    assert next(model_findings(VL, job)).startswith(f"actor_rollout_ref.{says}")
    assert next(model_findings(QWEN, job), None) is None


@pytest.mark.parametrize(
    ("group", "key", "value", "says"),
    [
        ("actor", "use_dynamic_bsz", True, "actor.use_dynamic_bsz=true is invalid: verl splits rows with images"),
        ("ref", "log_prob_use_dynamic_bsz", True, "ref.log_prob_use_dynamic_bsz=true is invalid: verl splits rows"),
        ("rollout", "log_prob_use_dynamic_bsz", True, "rollout.log_prob_use_dynamic_bsz=true is invalid: verl splits"),
        (
            "overlay",
            "partial_rollout",
            {"enabled": True},
            "partial_rollout.enabled=true is invalid: a continued answer would lose",
        ),
    ],
)
def test_features_without_images_rejected(group, key, value, says):
    for config in (VL, QWEN):
        job = use(backend="fsdp")
        job.node.setdefault(group, {})[key] = value
        found = next(model_findings(config, job), None)
        assert found is None if config is QWEN else says in found
