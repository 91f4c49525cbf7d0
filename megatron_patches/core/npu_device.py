"""Megatron's calls to torch.cuda go to the NPU."""

from importlib.util import find_spec

from overlay import before_import
from verl_patches.features.compatibility.feature import MEGATRON_ON_NPU


@before_import(
    "megatron.core",
    feature=MEGATRON_ON_NPU,
    why="Megatron calls torch.cuda everywhere; transfer_to_npu is the vendor's way to send those calls to the NPU",
    upstream="not forwarded: Megatron is written for CUDA; forks for other devices replace its calls one by one, as "
    "https://github.com/flagos-ai/Megatron-LM-FL/pull/127 does",
    remove_when="Megatron and verl address the device through one interface of torch",
    evidence="executed",
)
def transfer_to_npu() -> None:
    # verl.utils.device asks torch.cuda.is_available() while it is imported. Afterwards torch.cuda is the NPU, and verl
    # would take its CUDA branches.
    if find_spec("verl") is not None:
        import verl.utils.device  # noqa: F401
    from torch_npu.contrib import transfer_to_npu  # noqa: F401
