"""Every relevant verl key becomes the right MindSpeed-LLM argument."""

import functools
import json
from pathlib import Path

import pytest
from transformers import DeepseekV3Config

from verl_patches.features.mindspeed.arguments import command_line, translate
from verl_patches.features.settings import OverlaySettings
from verl_patches.trainer.main_ppo import compose

PUBLISHED = Path(__file__).parents[3] / "post_training" / "plan" / "deepseek_v3_config.json"
MEGATRON = "actor_rollout_ref.actor.megatron"
CHECKPOINTING = "actor_rollout_ref.model.gradient_checkpointing_kwargs"
ENGINE = "actor_rollout_ref.overlay.mindspeed"


def published(**changes) -> DeepseekV3Config:
    """Return DeepSeek-V3's configuration in bfloat16, without its multi-token prediction layer."""
    values = json.loads(PUBLISHED.read_text()) | {"num_nextn_predict_layers": 0} | changes
    return DeepseekV3Config(**{name: value for name, value in values.items() if name != "quantization_config"})


@functools.cache
def node(*overrides):
    return compose("deepseek_v3_256die_true_weight", list(overrides)).actor_rollout_ref


def arguments(*overrides, model=None):
    """Return the arguments of the job with real weights."""
    settings = OverlaySettings.from_config(node(*overrides))
    return translate(node(*overrides), model or published(), settings)


def test_the_cluster_job():
    expected = {
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 8,
        "num_layer_list": "7,7,8,8,8,8,8,7",
        "expert_model_parallel_size": 8,
        "moe_tp_extend_ep": True,
        "moe_token_dispatcher_type": "alltoall",
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 8,
        "use_distributed_optimizer": True,
        "swap_optimizer": True,
        "swap_optimizer_times": 16,
        "use_fused_rotary_pos_emb": True,
        "use_fused_swiglu": True,
        "use_fused_rmsnorm": True,
        "use_fused_moe_token_permute_and_unpermute": True,
        "gemm_gradient_accumulation_fusion": True,
        "no_gradient_accumulation_fusion": False,
        "seq_length": 4096,
        "num_layers": 61,
        "num_experts": 256,
        "router_gating_in_fp32": True,
        "fix_router": False,
        "rope_scaling_factor": 40,
    }
    found = arguments()
    assert {name: found[name] for name in expected} == expected


# Arguments that follow from no verl key and no model field. The values are those of MindSpeed-LLM v2.0.0's own
# script for the A3, examples/mcore/deepseek3/pretrain_deepseek3_671b_4k_A3_ptd.sh.
OF_THE_VENDORS_SCRIPT = {
    "spec": ["mindspeed_llm.tasks.models.spec.deepseek_spec", "layer_spec"],
    "use_mcore_models": True,
    "make_vocab_size_divisible_by": 1,
    "untie_embeddings_and_output_weights": True,
    "disable_bias_linear": True,
    "swiglu": True,
    "normalization": "RMSNorm",
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "attention_softmax_in_fp32": True,
    "no_masked_softmax_fusion": True,
    "multi_head_latent_attention": True,
    "qk_layernorm": True,
    "position_embedding_type": "rope",
    "use_rotary_position_embeddings": True,
    "rope_scaling_type": "yarn",
    "moe_layer_freq": 1,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "noaux_tc",
    "moe_router_enable_expert_bias": True,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_permutation_async_comm": True,
    "distributed_backend": "nccl",
    "use_distributed_optimizer": True,
    "use_flash_attn": True,
    "mla_fa_without_pad": True,
    "reset_position_ids": True,
    "bf16": True,
    "micro_batch_size": 1,
}
# Differences from pre-training: experts are not balanced, lengths vary, and verl owns the steps and learning rates.
OF_POST_TRAINING = {
    "moe_router_bias_update_rate": 0.0,
    "moe_aux_loss_coeff": 0.0,
    "variable_seq_lengths": True,
    "train_iters": 1,
    "lr": 0.0,
}


def test_what_is_fixed():
    fixed, found = OF_THE_VENDORS_SCRIPT | OF_POST_TRAINING, arguments()
    assert {name: found[name] for name in fixed} == fixed


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [f"{MEGATRON}.tensor_model_parallel_size=1"],
            {"tensor_model_parallel_size": 1, "sequence_parallel": False, "moe_tp_extend_ep": False},
        ),
        ([f"{MEGATRON}.pipeline_model_parallel_size=1"], {"pipeline_model_parallel_size": 1}),
        ([f"{MEGATRON}.expert_model_parallel_size=2"], {"expert_model_parallel_size": 2}),
        ([f"{MEGATRON}.override_transformer_config.num_layer_list=[30,31]"], {"num_layer_list": "30,31"}),
        ([f"{MEGATRON}.override_transformer_config.num_layer_list=[61]"], {"num_layer_list": None}),
        ([f"{MEGATRON}.override_transformer_config.num_layer_list=null"], {"num_layer_list": None}),
        ([f"{CHECKPOINTING}.activations_checkpoint_num_layers=3"], {"recompute_num_layers": 3}),
        ([f"{CHECKPOINTING}.activations_checkpoint_method=uniform"], {"recompute_method": "uniform"}),
        (
            ["actor_rollout_ref.model.enable_gradient_checkpointing=false"],
            {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None},
        ),
        ([f"{ENGINE}.swap_optimizer=false"], {"swap_optimizer": False, "swap_optimizer_times": None}),
        ([f"{ENGINE}.swap_optimizer_times=4"], {"swap_optimizer_times": 4}),
        (
            [f"{ENGINE}.fused_operators=false"],
            {
                "use_fused_rotary_pos_emb": False,
                "use_fused_swiglu": False,
                "use_fused_rmsnorm": False,
                "use_fused_moe_token_permute_and_unpermute": False,
                "gemm_gradient_accumulation_fusion": False,
                "no_gradient_accumulation_fusion": True,
            },
        ),
        (["actor_rollout_ref.overlay.precision=float32"], {"router_gating_in_fp32": False}),
        (["actor_rollout_ref.overlay.router_balance.forced=true"], {"fix_router": True}),
        (["actor_rollout_ref.rollout.response_length=9"], {"seq_length": 1033}),
    ],
)
def test_a_key_changes_its_arguments_and_no_others(overrides, expected):
    before, after = arguments(), arguments(*overrides)
    changed = {name: after.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == expected


@pytest.mark.parametrize(
    ("field", "argument"),
    [
        ("num_hidden_layers", "num_layers"),
        ("hidden_size", "hidden_size"),
        ("intermediate_size", "ffn_hidden_size"),
        ("num_attention_heads", "num_attention_heads"),
        ("max_position_embeddings", "max_position_embeddings"),
        ("rms_norm_eps", "norm_epsilon"),
        ("q_lora_rank", "q_lora_rank"),
        ("kv_lora_rank", "kv_lora_rank"),
        ("qk_nope_head_dim", "qk_nope_head_dim"),
        ("qk_rope_head_dim", "qk_rope_head_dim"),
        ("v_head_dim", "v_head_dim"),
        ("rope_theta", "rotary_base"),
        ("n_routed_experts", "num_experts"),
        ("first_k_dense_replace", "first_k_dense_replace"),
        ("n_shared_experts", "n_shared_experts"),
        ("moe_intermediate_size", "moe_intermediate_size"),
        ("num_experts_per_tok", "moe_router_topk"),
        ("n_group", "n_group"),
        ("topk_group", "topk_group"),
        ("routed_scaling_factor", "routed_scaling_factor"),
        ("norm_topk_prob", "norm_topk_prob"),
    ],
)
def test_a_field_of_the_model_is_one_argument(field, argument):
    value = False if field == "norm_topk_prob" else 12345
    before, after = arguments(), arguments(model=published(**{field: value}))
    assert {name: after[name] for name in after if after[name] != before[name]} == {argument: value}


@pytest.mark.parametrize(
    "field",
    ["factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"],
)
def test_a_field_of_yarn_is_one_argument(field):
    scaling = published().rope_scaling
    before, after = arguments(), arguments(model=published(rope_scaling=scaling | {field: 7}))
    assert before[f"rope_scaling_{field}"] == scaling[field]
    assert {name: after[name] for name in after if after[name] != before[name]} == {f"rope_scaling_{field}": 7}


def test_yarn_as_megatron_has_it_where_the_model_says_less():
    found = arguments(
        model=published(rope_scaling={"type": "yarn", "factor": 2, "original_max_position_embeddings": 9})
    )
    yarn = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    assert [found[f"rope_scaling_{field}"] for field in yarn] == [32, 1, 1.0, 0.0]


def test_the_vocabulary_is_never_padded():
    found = arguments(model=published(vocab_size=333))
    assert (found["vocab_size"], found["padded_vocab_size"], found["make_vocab_size_divisible_by"]) == (333, 333, 1)


def test_without_yarn_nothing_is_scaled_and_other_kinds_rejected():
    assert not [name for name in arguments(model=published(rope_scaling=None)) if name.startswith("rope_scaling")]
    with pytest.raises(ValueError, match="'linear' is not supported"):
        arguments(model=published(rope_scaling={"type": "linear", "factor": 2}))


def test_multi_token_prediction_rejected():
    with pytest.raises(ValueError, match="num_nextn_predict_layers to 0"):
        arguments(model=published(num_nextn_predict_layers=1))


def test_the_command_line_leaves_out_what_is_off():
    words = command_line({"a_flag": True, "off": False, "none": None, "size": 0, "spec": ["module", "name"]})
    assert words == ["--a-flag", "--size", "0", "--spec", "module", "name"]
