"""Patches of verl's Megatron critic: values of answers only, updates that skip non-finite gradients, exact losses, and
dynamic micro batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.critic.feature import CRITIC
from verl_patches.features.dynamic_batches.feature import DYNAMIC_BATCHES
from verl_patches.features.exact_loss.feature import EXACT_LOSS
from verl_patches.features.nonfinite.feature import NONFINITE
from verl_patches.features.watch.feature import WATCH

if TYPE_CHECKING:
    import torch
    from verl import DataProto
    from verl.workers.critic.megatron_critic import MegatronPPOCritic

_CRITIC = "verl.workers.critic.megatron_critic:MegatronPPOCritic"
_SCHEDULE = "verl.workers.critic.megatron_critic:get_forward_backward_func"
_UNEQUAL = "https://github.com/verl-project/verl/issues/5863"


@wrap(
    f"{_CRITIC}.__init__",
    feature=CRITIC,
    why="without it Megatron sums no gradients over ranks: replicas diverge, and under sequence parallelism so do the "
    "parameters that tensor-parallel ranks share",
    upstream="https://github.com/verl-project/verl/pull/5702",
    remove_when="the pinned verl's Megatron critic gives its model finalize_model_grads, as the actor does",
    relies_on=["megatron.core.distributed.finalize_model_grads:finalize_model_grads"],
)
def init(upstream: Callable[..., None], self: MegatronPPOCritic, *args: Any, **kwargs: Any) -> None:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config

    upstream(self, *args, **kwargs)
    for chunk in self.critic_module:
        get_model_config(chunk).finalize_model_grads_func = finalize_model_grads


@wrap(
    f"{_CRITIC}.compute_values",
    feature=CRITIC,
    why="at the cluster's commit a value stays after the last token, and that token's advantage then depends on it",
    upstream="https://github.com/verl-project/verl/pull/1850",
    remove_when="the pinned verl's Megatron critic masks values by the tokens of responses",
)
def compute_values(upstream: Callable[..., torch.Tensor], self: MegatronPPOCritic, data: DataProto) -> torch.Tensor:
    from verl_patches.features.critic.tokens import values_of_tokens

    return values_of_tokens(upstream(self, data), data.batch)


@wrap(
    f"{_CRITIC}.forward_backward_batch",
    feature=EXACT_LOSS,
    why="the schedule that weights micro batches does not know the model, and a critic has its own mode",
    upstream=_UNEQUAL,
    remove_when="see get_forward_backward_func",
)
def forward_backward_batch(
    upstream: Callable[..., Any], self: MegatronPPOCritic, *args: Any, **kwargs: Any
) -> list[Any] | dict[str, Any]:
    from verl_patches.features.exact_loss.update_loss import of_critic

    with of_critic(self.config.loss_agg_mode):
        return upstream(self, *args, **kwargs)


@wrap(
    _SCHEDULE,
    feature=EXACT_LOSS,
    relies_on=[f"{_CRITIC}.forward_backward_batch", "verl.trainer.ppo.core_algos:agg_loss"],
    why="verl takes the mean of each micro batch and Megatron the mean of those over micro batches and ranks: a token "
    "in a short batch counts for more, and gradients depend on how the batch was split",
    upstream=_UNEQUAL,
    remove_when="the pinned verl's Megatron critic divides by the tokens and sequences of the whole mini batch",
    only_here=True,
)
def get_exact_forward_backward_func(upstream: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    from megatron.core import mpu

    from verl_patches.features.exact_loss.update_loss import critics_mode, with_exact_loss

    return with_exact_loss(upstream(), critics_mode(), mpu.get_data_parallel_group())


@wrap(
    f"{_CRITIC}.forward_backward_batch",
    feature=DYNAMIC_BATCHES,
    why="sets how many tokens a micro batch of this pass may have, and passes the batch on whole",
    upstream="https://github.com/verl-project/verl/pull/1617",
    remove_when="see get_forward_backward_func",
    outside=["exact_loss"],
)
def forward_backward_whole_batch(
    upstream: Callable[..., Any], self: MegatronPPOCritic, data: DataProto, forward_only: bool = False, **kwargs: Any
) -> list[Any] | dict[str, Any]:
    from verl_patches.features.dynamic_batches.feature import limit_of_critic
    from verl_patches.features.dynamic_batches.micro_batches import limited

    config = self.config
    limit = limit_of_critic(config, forward_only)
    if limit is None:
        return upstream(self, data, forward_only=forward_only, **kwargs)
    rows, micro = len(data.batch), config.ppo_micro_batch_size_per_gpu
    asked = kwargs.get("use_dynamic_bsz")
    if asked is not None:
        kwargs.update(use_dynamic_bsz=False, micro_batch_size=rows)
    config.ppo_micro_batch_size_per_gpu = rows  # the cluster's commit reads it here
    try:
        with limited(limit):
            output = upstream(self, data, forward_only=forward_only, **kwargs)
    finally:
        config.ppo_micro_batch_size_per_gpu = micro
    if asked:
        output["indices"] = [range(rows)]  # in order already
    return output


@wrap(
    _SCHEDULE,
    feature=DYNAMIC_BATCHES,
    relies_on=[f"{_CRITIC}.forward_backward_batch"],
    why="verl 0.4.0 gives micro batches of different sizes the same weight in the loss, and the cluster's commit "
    "ignores the keys; in Megatron's schedule the batch can be split for both",
    upstream="https://github.com/verl-project/verl/pull/1617",
    remove_when="the pinned verl's Megatron critic splits by tokens and weights micro batches by their content",
    outside=["exact_loss"],
    only_here=True,
)
def get_cutting_forward_backward_func(upstream: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    from verl_patches.features.dynamic_batches.micro_batches import agreement_of_ranks, with_dynamic_batches

    return with_dynamic_batches(upstream(), agreement_of_ranks())


@wrap(
    _SCHEDULE,
    feature=WATCH,
    relies_on=[f"{_CRITIC}.forward_backward_batch"],
    why="a phase of long answers takes longer than any hang detector waits; each finished micro batch counts as "
    "progress",
    outside=["dynamic_batches", "exact_loss"],
    only_here=True,
)
def get_watched_forward_backward_func(upstream: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    from post_training.hang_detection.progress import with_progress

    return with_progress(upstream())


@wrap(
    f"{_CRITIC}.update_critic",
    feature=NONFINITE,
    relies_on=["megatron.core.optimizer.optimizer:ChainedOptimizer.step"],
    why="bfloat16 has no gradient scaler in Megatron, so inf and nan reach the weights; verl skips such steps on FSDP",
    upstream="docs/upstream/verl-megatron-nonfinite-gradients.md",
    remove_when="verl's Megatron critic skips steps with non-finite gradients",
)
def update_critic(
    upstream: Callable[..., dict[str, Any]], self: MegatronPPOCritic, dataloader: Iterable[DataProto]
) -> dict[str, Any]:
    from verl_patches.features.nonfinite.updates import guarded

    return guarded(self, "critic", lambda: upstream(self, dataloader))
