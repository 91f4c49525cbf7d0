"""vLLM's V1 engine accepts float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.precision.feature import PRECISION

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs


@wrap(
    "vllm.engine.arg_utils:EngineArgs._is_v1_supported_oracle",
    feature=PRECISION,
    why="it rejects float32 because of CUDA's flash attention; on an NPU the attention is vLLM-Ascend's",
    upstream="https://github.com/vllm-project/vllm/pull/19754",
    remove_when="the pinned vLLM accepts float32 for V1",
)
def is_v1_supported_oracle(upstream: Callable[..., bool], self: EngineArgs, model_config: ModelConfig) -> bool:
    from verl_patches.features.precision.dtypes import as_if_half

    return upstream(self, as_if_half(model_config))
