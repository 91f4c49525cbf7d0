"""Which models a job can use: each rule by its sentence, over the config.json of published models."""

import pytest

from post_training.plan.model_findings import ModelUse, model_findings
from tests.post_training.models.published_configs import PUBLISHED_CONFIGS

V3 = PUBLISHED_CONFIGS["deepseek-ai/DeepSeek-V3, edited"]
QWEN = PUBLISHED_CONFIGS["Qwen/Qwen2.5-7B-Instruct"]
QWEN3 = PUBLISHED_CONFIGS["Qwen/Qwen3-8B"]
MOE = PUBLISHED_CONFIGS["Qwen/Qwen3-30B-A3B"]
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
        (QWEN, {"architectures": ["Qwen2ForCausalLM", "Other"]}, {}, "of the one architecture that is named there"),
        (QWEN, {"architectures": ["Qwen2Model"]}, {}, "no layout table describes architecture Qwen2Model; known are"),
        (QWEN, {"model_type": None}, {}, "model_type=null of the model's config.json is invalid"),
        (QWEN, {"hidden_size": "3584"}, {}, 'hidden_size="3584" of the model\'s config.json is invalid'),
        (QWEN, {"num_attention_heads": 0}, {}, "every Qwen2.5 has an integer above 0 there"),
        (QWEN, {"num_key_value_heads": None}, {}, "num_key_value_heads=null"),
        (QWEN, {"num_hidden_layers": True}, {}, "num_hidden_layers=true"),
        (QWEN3, {"attention_bias": True}, {}, "needs attention_bias=False"),
        (QWEN, {"hidden_act": "gelu"}, {}, 'hidden_act="gelu" of the model'),
        (QWEN, {"attention_dropout": 0.1}, {}, "attention on the NPU has no dropout"),
        (MOE, {"mlp_only_layers": [0]}, {}, "mlp_only_layers=[0] of the model's config.json is invalid"),
        (MOE, {"tie_word_embeddings": True}, {}, "have weights of their own"),
        (V3, {"scoring_func": "softmax"}, {}, "compute DeepSeek-V3's scoring_func=sigmoid"),
        (V3, {"rope_scaling": {"type": "linear", "factor": 2}}, {}, "Megatron's DeepSeek-V3 uses yarn alone"),
        (V3, {"rope_scaling": {"type": "yarn", "factor": 2}}, {}, "a number for original_max_position_embeddings"),
        (MOE, {"rope_scaling": {"type": "yarn", "factor": 2}}, {}, "Megatron's Qwen3-MoE scales no positions"),
        (QWEN, {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, {}, "Megatron's Qwen2.5 uses linear alone"),
        (QWEN, {"max_position_embeddings": 4095}, {}, "have up to 4096 tokens"),
        (QWEN, {}, {"rollout": {"max_model_len": 40000}}, "have up to 40000 tokens"),
        (QWEN, {}, {"tensor_model_parallel_size": 7}, "does not divide the model's 4 heads of key and value"),
        (QWEN, {}, {"expert_model_parallel_size": 2}, "spreads experts, and the model has none; set it to 1"),
        (QWEN, {}, {"spread": 4}, "expert_parallel_size=4 spreads experts, and the model has none"),
        (MOE, {}, {"expert_model_parallel_size": 3}, "the model's 128 experts on 3 ranks"),
        (MOE, {"num_experts_per_tok": 129}, {}, "moe_router_topk exceeds"),
        (V3, {}, {"dies": 64, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 31,
                  "override_transformer_config": {"num_layer_list": [3, 1, *[2] * 28, 1]}}, "all dense: with expert"),
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
    """verl overrides values of config.json on Megatron, for training alone."""
    job = use()
    job.node["model"]["override_config"] = {"model_config": {"num_nextn_predict_layers": 0}}
    assert list(model_findings(V3 | {"num_nextn_predict_layers": 1}, job)) == []


def test_positions_of_yarn_make_the_context_longer():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    scaled = QWEN | {"rope_scaling": yarn, "max_position_embeddings": 131072}  # as rotary_findings wants it
    longest = {"rollout": {"prompt_length": 1024, "response_length": 4 * 32768 - 1024}, "backend": "fsdp"}
    assert first(scaled, **longest) is None and "131072 tokens" in (first(QWEN, **longest) or "")
    longest["rollout"]["response_length"] += 1
    assert "131073 tokens" in (first(scaled, **longest) or "")


def test_critic_is_not_served():
    longest = {"rollout": {"prompt_length": 1024, "response_length": 40000}}
    assert first(QWEN, serves=False, **longest) is None and first(QWEN, **longest) is not None
