"""verl's Megatron checkpoints of DeepSeek-V3."""

from overlay import wrap
from verl_patches.features.compatibility.feature import DEEPSEEK_V3


@wrap(
    "verl.models.weight_loader_registry:get_weight_saver",
    feature=DEEPSEEK_V3,
    why="at the cluster's commit it refuses DeepSeek-V3, and with it every worker; later it gathers parameters of "
    "transformer_engine, which this model does not have",
    upstream="not forwarded: verl supports megatron-core 0.12 and later",
    remove_when="the pinned megatron-core has multi-head latent attention and DeepSeek's router",
    evidence="executed",
)
def get_weight_saver(upstream, arch):
    return _refuse if arch == "DeepseekV3ForCausalLM" else upstream(arch)


def _refuse(*args, **kwargs):
    """Stand where verl would gather a HuggingFace checkpoint."""
    raise NotImplementedError(
        "DeepSeek-V3 cannot be saved as a HuggingFace checkpoint by a run: take hf_model out of "
        "actor_rollout_ref.actor.checkpoint.contents (docs/weights.md says what can be saved)"
    )
