"""Patches of verl's FSDP critic: values of answers only, float32 if configured, an exact loss, and a count of skipped
updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.critic.feature import CRITIC
from verl_patches.features.exact_loss.feature import EXACT_LOSS
from verl_patches.features.nonfinite.feature import NONFINITE
from verl_patches.features.precision.feature import PRECISION
from verl_patches.features.watch.feature import WATCH

if TYPE_CHECKING:
    import torch
    from verl import DataProto
    from verl.workers.critic.dp_critic import DataParallelPPOCritic

_CRITIC = "verl.workers.critic.dp_critic:DataParallelPPOCritic"
_MASKED = "https://github.com/verl-project/verl/pull/1850"


@wrap(
    f"{_CRITIC}.__init__",
    feature=PRECISION,
    why="verl computes every forward under the device's autocast to bfloat16; under the host's autocast nothing "
    "is cast",
    upstream="not forwarded: float32 is for comparisons",
    remove_when="verl's FSDP critic reads the type of its autocast from the configuration",
    relies_on=[f"{_CRITIC}._forward_micro_batch"],
)
def init(upstream: Callable[..., None], self: DataParallelPPOCritic, *args: Any, **kwargs: Any) -> None:
    upstream(self, *args, **kwargs)
    self.device_name = "cpu"


@wrap(
    f"{_CRITIC}.compute_values",
    feature=CRITIC,
    why="at the cluster's commit a value stays after the last token, and that token's advantage then depends on it; "
    "and bfloat16 values would be subtracted from each other in bfloat16",
    upstream=_MASKED,
    remove_when="the pinned verl's FSDP critic masks values by the tokens of responses, in float32",
)
def compute_values(upstream: Callable[..., torch.Tensor], self: DataParallelPPOCritic, data: DataProto) -> torch.Tensor:
    from verl_patches.features.critic.tokens import values_of_tokens

    return values_of_tokens(upstream(self, data), data.batch)


@wrap(
    f"{_CRITIC}._forward_micro_batch",
    feature=CRITIC,
    why="the loss that follows only knows verl's mask",
    upstream=_MASKED,
    remove_when="see compute_value_loss",
    relies_on=[f"{_CRITIC}.update_critic"],
)
def forward_micro_batch(
    upstream: Callable[..., torch.Tensor], self: DataParallelPPOCritic, micro_batch: dict[str, Any]
) -> torch.Tensor:
    from verl_patches.features.critic.tokens import last_forward, response_mask

    last_forward().hold(response_mask(micro_batch))
    return upstream(self, micro_batch)


@wrap(
    f"{_CRITIC}._forward_micro_batch",
    feature=EXACT_LOSS,
    why="the weight of a micro batch in its update's loss is applied to the gradients of its values",
    upstream="https://github.com/verl-project/verl/issues/5863",
    remove_when="see update_critic",
    relies_on=[f"{_CRITIC}.update_critic"],
    outside=["critic"],
)
def forward_weighed_micro_batch(
    upstream: Callable[..., torch.Tensor], self: DataParallelPPOCritic, micro_batch: dict[str, Any]
) -> torch.Tensor | None:
    from verl_patches.features.critic.tokens import response_mask

    values = upstream(self, micro_batch)
    factors = getattr(self, "update_in_progress", None)
    if factors is None:  # a pass for values only
        return values
    return factors.weigh(response_mask(micro_batch), values)[0]


@wrap(
    f"{_CRITIC}._forward_micro_batch",
    feature=WATCH,
    why="a phase of long answers takes longer than any hang detector waits; each finished micro batch counts as "
    "progress",
    outside=["critic", "exact_loss"],
)
def watched_forward_micro_batch(
    upstream: Callable[..., torch.Tensor], self: DataParallelPPOCritic, micro_batch: dict[str, Any]
) -> torch.Tensor:
    from post_training.hang_detection.progress import finished_forward

    output = upstream(self, micro_batch)
    finished_forward(output)
    return output


@wrap(
    f"{_CRITIC}.update_critic",
    feature=EXACT_LOSS,
    why="verl takes the mean of each micro batch, then that of micro batches and ranks: a token in a short batch "
    "counts for more, and gradients depend on how the batch was split",
    upstream="https://github.com/verl-project/verl/issues/5863",
    remove_when="the pinned verl's FSDP critic divides by the tokens and sequences of the whole mini batch",
    relies_on=["verl.trainer.ppo.core_algos:agg_loss", "verl.trainer.ppo.core_algos:compute_value_loss"],
)
def update_critic(
    upstream: Callable[..., dict[str, Any]], self: DataParallelPPOCritic, data: DataProto
) -> dict[str, Any]:
    from verl.utils.device import get_device_name

    from verl_patches.features.critic.tokens import response_mask
    from verl_patches.features.exact_loss.gradient_factors import OF_CRITIC, UpdateFactors

    config = self.config
    cut = None if config.use_dynamic_bsz else config.ppo_micro_batch_size_per_gpu
    mask = response_mask(data.batch).to(get_device_name())
    factors = UpdateFactors(config.loss_agg_mode, mask, config.ppo_mini_batch_size, cut)
    self.update_in_progress = factors
    try:
        metrics = upstream(self, data)
    finally:
        del self.update_in_progress
    factors.report(metrics, OF_CRITIC)
    return metrics


@wrap(
    f"{_CRITIC}._optimizer_step",
    feature=NONFINITE,
    why="verl skips an update with non-finite gradients and prints a line; a run must end with it counted",
    upstream="not forwarded: part of this project's features",
    remove_when="verl reports skipped updates as a metric",
)
def optimizer_step(upstream: Callable[..., torch.Tensor], self: DataParallelPPOCritic) -> torch.Tensor:
    from verl_patches.features.measure.step_record import current_record

    norm = upstream(self)
    current_record().count("critic/nonfinite_steps", int(not norm.isfinite()))
    return norm
