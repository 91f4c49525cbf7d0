"""All shipped jobs, by name, with the overrides with which they are tested."""

# For models with 36, 48 and 94 layers on eight stages.
_STAGES = "actor_rollout_ref.actor.megatron.override_transformer_config.num_layer_list"

JOBS: dict[str, tuple[str, ...]] = {
    "deepseek_v3_256die_true_weight": (),
    "deepseek_v3_256die_random_init": (),
    "deepseek_v3_256die_dapo": (),
    "deepseek_v3_256die_true_weight without graphs, 48 layers": ("+graph=off", f"{_STAGES}=[6,6,6,6,6,6,6,6]"),
    "qwen2_5_32b_dapo": (),
    "qwen2_5_0_5b_gsm8k": (),
    "qwen2_5_1_5b_math_one_card": (),
    "qwen2_5_1_5b_math_one_card with FSDP2": ("actor_rollout_ref.actor.strategy=fsdp2",),
    "qwen2_5_vl_3b_geo3k_one_card": (),
    "qwen2_5_vl_7b_geo3k": (),
    "qwen2_5_vl_32b_geo3k": (),
    "rehearsal": (),
}
