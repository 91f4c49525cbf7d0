"""Training with Megatron-core in float32, for runs that compare training with rollout: rehearsals and tests.

verl's key `actor_rollout_ref.actor.megatron.dtype` takes `bfloat16` and `float16` alone, although the rest of its
engine knows float32. This module registers verl's engine `megatron` once more, for the NPUs of Huawei, which verl
prefers to that for any NPU: every parameter, gradient and export is in float32, whatever the key says.

    VERL_USE_EXTERNAL_MODULES=verl_plugin.megatron_float32
"""

import torch
from verl.workers.engine import EngineRegistry, MindspeedEngineWithLMHead

import verl_plugin.megatron_core  # noqa: F401  (the bridges)


@EngineRegistry.register(model_type="language_model", backend="megatron", device="npu", vendor="huawei")
class Float32Engine(MindspeedEngineWithLMHead):
    """verl's engine with parameters in float32; needs actor_rollout_ref.actor.megatron.vanilla_mbridge=true."""

    def _build_tf_config(self) -> None:
        super()._build_tf_config()
        self.param_dtype = self.dtype = self.bridge.dtype = torch.float32
        # Read where the model is built, after this: nothing that the configuration derives from bf16 is in use without
        # kernels of TransformerEngine.
        config = self.tf_config
        config.bf16 = False
        config.params_dtype = config.pipeline_dtype = config.autocast_dtype = torch.float32
