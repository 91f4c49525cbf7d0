"""Training with Megatron-core in float32, for runs that compare training with rollout: rehearsals and tests.

verl's key `actor_rollout_ref.actor.megatron.dtype` takes only `bfloat16` and `float16`, although the rest of its
engine knows float32. This module extends verl's engine `megatron` on NPUs: every parameter, gradient and export is in
float32, whatever the key says. The bridges come from a module before it.

    VERL_USE_EXTERNAL_MODULES=verl_plugin.megatron_core,verl_plugin.megatron_float32
"""

from typing import Any

import torch

from verl_plugin.engines import extend_engine


class Float32:
    """verl's engine with parameters in float32; needs actor_rollout_ref.actor.megatron.vanilla_mbridge=true."""

    bridge: Any
    tf_config: Any

    def _build_tf_config(self) -> None:
        super()._build_tf_config()  # type: ignore[misc]  # of the engine that this extends
        self.param_dtype = self.dtype = self.bridge.dtype = torch.float32
        # Read where the model is built, after this: nothing that the configuration derives from bf16 is in use without
        # kernels of TransformerEngine.
        config = self.tf_config
        config.bf16 = False
        config.params_dtype = config.pipeline_dtype = config.autocast_dtype = torch.float32


extend_engine("megatron", Float32)
