"""The mixed-precision optimizer accepts parameters on an NPU."""

from collections.abc import Callable
from typing import Any

from megatron_patches.core.optimizer.cuda_type_names import cuda_type_names
from overlay import wrap
from verl_patches.features.compatibility.feature import MEGATRON_ON_NPU


@wrap(
    "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
    feature=MEGATRON_ON_NPU,
    why="it sorts parameters by the text of Tensor.type() and knows only torch.cuda types",
    upstream="docs/upstream/megatron-tensor-type.md",
    remove_when="Megatron sorts parameters by dtype",
)
def init(upstream: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with cuda_type_names():
        return upstream(*args, **kwargs)
