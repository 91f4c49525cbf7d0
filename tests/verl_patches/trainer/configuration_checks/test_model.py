"""The model's config.json is checked against the layout, and graphs and lengths against the engine's limits."""

import json

import pytest

from overlay import ConfigurationError
from rehearsal.tiny_model.architecture import TINY_MODELS
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose

MEGATRON = "actor_rollout_ref.actor.megatron"
TRANSFORMER = f"{MEGATRON}.override_transformer_config"
ROLLOUT = "actor_rollout_ref.rollout"
ADDITIONAL = f"+{ROLLOUT}.engine_kwargs.vllm.additional_config"
TINY = {"model_type": "deepseek_v3", **TINY_MODELS["deepseek_v3"]}
QWEN2 = {"model_type": "qwen2", **TINY_MODELS["qwen2"], "num_hidden_layers": 4}
NO_EXPERTS = "actor_rollout_ref.overlay.rollout.expert_parallel_size=1"
BY_VERL = [f"~{TRANSFORMER}.num_layer_list", f"~{TRANSFORMER}.moe_tp_extend_ep", NO_EXPERTS]
GRAPHS = [f"{ROLLOUT}.enforce_eager=false", f"{ROLLOUT}.free_cache_engine=false"]
TORCHAIR = f"{ADDITIONAL}.torchair_graph_config"


def check(model, *overrides):
    check_configuration(compose("rehearsal", list(overrides)), model)


@pytest.mark.parametrize(
    ("model", "overrides", "says"),
    [
        (TINY, [f"{TRANSFORMER}.num_layer_list=[5,5]"], r"num_layer_list=\[5, 5\] adds up to 10 layers, .* has 3"),
        (
            TINY,
            [f"{TRANSFORMER}.num_layer_list=[3]"],
            r"num_layer_list=\[3\] is invalid: it has length 1, .* makes 2 stages",
        ),
        (TINY | {"num_hidden_layers": 24}, [], r"num_layer_list=\[2, 1\] adds up to 3 layers, but the model has 24"),
        (TINY, [f"{TRANSFORMER}.num_layer_list=[3,0]"], "num_layer_list.1=0 is invalid"),
        (TINY, [f"{TRANSFORMER}.num_layer_list=null"], "pipeline_model_parallel_size=2 does not divide the model's 3"),
        (TINY | {"num_attention_heads": 3}, [], "actor.megatron.tensor_model_parallel_size=2 does not divide .* 3 att"),
        (
            TINY | {"num_attention_heads": 2},
            [f"{ROLLOUT}.tensor_model_parallel_size=4", "actor_rollout_ref.overlay.rollout.expert_parallel_size=4"],
            "rollout.tensor_model_parallel_size=4 does not divide the model's 2 attention heads",
        ),
        (
            QWEN2 | {"num_attention_heads": 12, "num_key_value_heads": 3},
            [*BY_VERL, f"{MEGATRON}.tensor_model_parallel_size=1", f"{ROLLOUT}.tensor_model_parallel_size=2"],
            "rollout.tensor_model_parallel_size=2 neither divides the model's 3 key-value heads nor is a mult",
        ),
        (TINY | {"n_routed_experts": 255}, [], "puts the model's 255 experts on 2 ranks"),
        (
            TINY,
            [f"{MEGATRON}.expert_model_parallel_size=3"],
            "expert_model_parallel_size=3 does not divide the 1 train",
        ),
        (TINY, [f"{MEGATRON}.expert_tensor_parallel_size=1"], "expert_tensor_parallel_size=1 is not supported"),
        (
            TINY,
            [f"{ROLLOUT}.max_model_len=20"],
            "max_model_len=20 is less than data.max_prompt_length=16 .*Set it to 26",
        ),
        (
            TINY,
            [f"{ROLLOUT}.max_num_batched_tokens=16", f"{ADDITIONAL}.ascend_scheduler_config.enabled=true"],
            "max_num_batched_tokens=16 is less than the 32 tokens .*enable_chunked_prefill=True",
        ),
        (
            TINY,
            [f"{ROLLOUT}.max_num_batched_tokens=16", f"{ROLLOUT}.enable_chunked_prefill=true"],
            "max_num_batched_tokens=16 is less than .*enable_chunked_prefill=False",
        ),
        (TINY, GRAPHS[:1], "free_cache_engine=True is not supported with graphs"),
        (TINY, GRAPHS, "ACL graphs, which vLLM-Ascend does not have for deepseek_v3"),
        (
            QWEN2,
            [*BY_VERL, *GRAPHS, f"{TORCHAIR}.enabled=true"],
            "torchair's graphs, which vLLM-Ascend has for DeepSeek-V3 and",
        ),
        (TINY, [f"{TORCHAIR}.enabled=true"], "enforce_eager=True and torchair_graph_config.enabled=True contradict"),
        (TINY, [f"{TORCHAIR}.graph_batch_sizes=[8]"], r"graph_batch_sizes=\[8\] is only valid with enabled=True"),
        (TINY, [f"{TORCHAIR}.enable_kvnz=true"], "did you mean .*torchair_graph_config.enable_kv_nz"),
        (TINY, [f"{ADDITIONAL}.dynamic_eplb=true"], "dynamic_eplb=true is invalid: .*resharding"),
        (
            TINY,
            [f"+{ROLLOUT}.engine_kwargs.vllm.max_seqs=8"],
            "no such argument of vLLM's engine; did you mean .*max_num_seqs",
        ),
        (
            TINY,
            [f"+{ROLLOUT}.engine_kwargs.vllm.dtype=float16"],
            "already passed .* by verl; set .*rollout.dtype instead",
        ),
        (TINY, [f"+{ROLLOUT}.engine_kwargs.vllm.enable_sleep_mode=true"], "by verl; remove it"),
        (
            TINY,
            [f"+{TRANSFORMER}.num_moe_expert=4"],
            "no such field of Megatron's configuration; did you mean .*num_moe_exp",
        ),
        (TINY, ["actor_rollout_ref.model.enable_gradient_checkpointing=true"], "granularity=null recomputes nothing"),
        (
            TINY,
            [
                "actor_rollout_ref.model.enable_gradient_checkpointing=true",
                "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_granularity=full",
            ],
            "activations_checkpoint_method=null is invalid: full recomputation needs it",
        ),
        (
            QWEN2,
            BY_VERL[:1],
            "moe_tp_extend_ep=True is invalid: it is only for models that the overlay builds, and verl builds Qwen2.5",
        ),
        (
            QWEN2,
            [*BY_VERL[1:], f"{TRANSFORMER}.num_layer_list=[2,1]"],
            r"num_layer_list=\[2, 1\] adds up to 3 layers, but the model has 4",
        ),
        (QWEN2, [*BY_VERL[1:], f"{TRANSFORMER}.num_layer_list=[3,1]"], rf"Remove the key with ~{TRANSFORMER}.num"),
        (TINY, [f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=null"], "rollout.log_prob_micro_batch_size_per_gpu=null"),
    ],
)
def test_misfit_rejected_in_one_sentence(model, overrides, says):
    with pytest.raises(ConfigurationError, match=says) as rejection:
        check(model, *overrides)
    assert "\n" not in str(rejection.value)


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        (TINY, []),
        (TINY, [f"{TRANSFORMER}.num_layer_list=[1,2]"]),
        (TINY | {"num_hidden_layers": 4}, [f"{TRANSFORMER}.num_layer_list=null"]),
        (QWEN2, [*BY_VERL, *GRAPHS]),
        (TINY, [*GRAPHS, f"{TORCHAIR}.enabled=true", f"{TORCHAIR}.graph_batch_sizes=[8]"]),
        (TINY, [f"{ROLLOUT}.max_num_batched_tokens=16"]),
        (TINY, [f"+{ROLLOUT}.engine_kwargs.vllm.max_num_seqs=8", f"+{ROLLOUT}.engine_kwargs.vllm.dtype=null"]),
    ],
)
def test_fitting_job_passes(model, overrides):
    check(model, *overrides)


def test_the_models_own_file_is_read(tmp_path):
    path = f"actor_rollout_ref.model.path={tmp_path}"
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 24}))
    with pytest.raises(ConfigurationError, match="the model has 24; make it 24"):
        check(None, path)
    for content in ("{", "[1]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigurationError, match="config.json is .*[.] Copy the model again"):
            check(None, path)
    (tmp_path / "config.json").unlink()
    check(None, path, f"{TRANSFORMER}.num_layer_list=[5,5]")
