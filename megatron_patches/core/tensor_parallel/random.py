"""Megatron's random states reach the generators of the NPU."""

from collections.abc import Callable
from typing import Any

from overlay import wrap
from verl_patches.features.compatibility.feature import MEGATRON_ON_NPU


@wrap(
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
    feature=MEGATRON_ON_NPU,
    why="it reads torch.cuda.default_generators, and transfer_to_npu copied the name while the tuple was still empty",
    upstream="not forwarded: MindSpeed replaces the function with one that reads torch.npu.default_generators",
    remove_when="torch.cuda.default_generators after transfer_to_npu has the generators of the NPU",
    evidence="executed",
)
def set_rng_state(upstream: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    import torch

    torch.npu.init()  # which makes the generators; nothing happens where it has been done
    torch.cuda.default_generators = torch.npu.default_generators
    return upstream(*args, **kwargs)
