"""Megatron's distributed optimizer starts where apex is not installed."""

from types import ModuleType

from overlay import provide
from verl_patches.features.compatibility.feature import MEGATRON_ON_NPU


@provide(
    "apex.optimizers",
    feature=MEGATRON_ON_NPU,
    evidence="executed",
    why="Megatron's distributed optimizer refuses to start without apex's FusedAdam; elsewhere Megatron falls back to "
    "torch's AdamW",
    upstream="https://github.com/NVIDIA/Megatron-LM/commit/de16089be44bc6f0621b3ca7921916daf5fe94e8",
    remove_when="the pinned megatron-core falls back to torch's AdamW in its distributed optimizer",
)
def apex_optimizers(name: str) -> ModuleType:
    from types import ModuleType

    import torch

    module = ModuleType(name, "torch's optimizers under the names of apex's fused ones.")
    vars(module).update(FusedAdam=torch.optim.AdamW, FusedSGD=torch.optim.SGD)
    return module
