"""vLLM's data-parallel ranks agree over the device whether anyone has unfinished requests."""

from overlay import wrap
from verl_patches.features.dp_sync.feature import DP_SYNC


@wrap(
    "vllm.config:ParallelConfig.has_unfinished_dp",
    feature=DP_SYNC,
    evidence="executed",
    why="the offline engine all-reduces over gloo on the host before every step: 10 to 14 ms on 128 cards",
    upstream="https://github.com/vllm-project/vllm-ascend/pull/2102",
    remove_when="vLLM's offline engine agrees on the device group",
)
def has_unfinished_dp(upstream, dp_group, has_unfinished):
    from verl_patches.features import settings

    if not settings.current().dp_sync.enabled:
        return upstream(dp_group, has_unfinished)
    from vllm.distributed.parallel_state import get_dp_group

    from verl_patches.features.dp_sync.agreement import any_rank

    return any_rank(has_unfinished, get_dp_group().device_group)
