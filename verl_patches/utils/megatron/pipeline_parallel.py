"""Padding and unpadding for verl's Megatron code without flash-attn."""

from types import ModuleType

from overlay import provide
from verl_patches.features.compatibility.feature import MEGATRON_ON_NPU


@provide(
    "flash_attn.bert_padding",
    feature=MEGATRON_ON_NPU,
    why="verl.utils.megatron and verl.utils.torch_functional import it, and flash-attn does not exist on Ascend",
    upstream="docs/upstream/verl-flash-attn-padding.md",
    remove_when="verl's Megatron code takes these functions from somewhere that exists on Ascend",
    evidence="executed",
)
def bert_padding(name: str) -> ModuleType:
    from verl_patches.features.compatibility import unpadding

    return unpadding
