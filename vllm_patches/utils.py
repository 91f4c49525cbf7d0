"""vLLM registers its custom operators on torch 2.5.1."""

from overlay import register
from verl_patches.features.compatibility import VLLM_ON_TORCH_2_5


@register(
    "torch._library.infer_schema:SUPPORTED_PARAM_TYPES",
    feature=VLLM_ON_TORCH_2_5,
    why="vllm.utils.direct_register_custom_op has torch infer schemas, and torch 2.5.1 does not know list[int]",
    upstream="not forwarded: later torch releases know it; vllm-ascend rewrites the annotations instead, but only once "
    "its plugin is loaded, and the driver of verl imports vLLM's operators before that",
    remove_when="the pinned torch is 2.6 or later",
    evidence="executed",
)
def parameter_types(module):
    from typing import Optional

    # Optional[...] and not `| None`: the two are different keys, and the first is what vLLM writes.
    return {list[int]: "SymInt[]", Optional[list[int]]: "SymInt[]?"}  # noqa: UP045
