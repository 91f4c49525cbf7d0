"""vLLM's data-parallel ranks learn from the last forward's reduced state whether any has unfinished requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.dp_sync.feature import DP_SYNC

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@wrap(
    "vllm.config:ParallelConfig.has_unfinished_dp",
    feature=DP_SYNC,
    evidence="executed",
    why="the offline engine all-reduces over gloo on the host before every step: 10 to 14 ms on 128 cards",
    upstream="https://github.com/vllm-project/vllm-ascend/pull/2102",
    remove_when="vLLM's offline engine agrees on the device group",
)
def has_unfinished_dp(upstream: Callable[..., bool], dp_group: ProcessGroup, has_unfinished: bool) -> bool:
    import vllm.envs
    from vllm.distributed.parallel_state import get_dp_group

    from verl_patches.features.dp_sync.agreement import any_rank
    from verl_patches.features.dp_sync.decode_loop import loop_of

    if vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING:  # an engine core in another process asks every now and then
        return any_rank(has_unfinished, get_dp_group().device_group)
    return loop_of(get_dp_group(), DP_SYNC.current().lease_steps).goes_on(has_unfinished)
