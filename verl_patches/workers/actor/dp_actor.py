"""Patches of verl's FSDP actor: float32 if configured, exact losses, a count of skipped updates, and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.compatibility.feature import FULLY_SHARDED
from verl_patches.features.exact_loss.feature import EXACT_LOSS
from verl_patches.features.nonfinite.feature import NONFINITE
from verl_patches.features.precision.feature import PRECISION
from verl_patches.features.watch.feature import WATCH

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict
    from verl import DataProto
    from verl.workers.actor.dp_actor import DataParallelPPOActor

_ACTOR = "verl.workers.actor.dp_actor:DataParallelPPOActor"


@wrap(
    f"{_ACTOR}.__init__",
    feature=PRECISION,
    why="verl computes every forward under the device's autocast to bfloat16; under the host's autocast nothing "
    "is cast",
    upstream="not forwarded: float32 is for comparisons",
    remove_when="verl's FSDP actor reads the type of its autocast from the configuration",
    relies_on=[f"{_ACTOR}._forward_micro_batch"],
)
def init(upstream: Callable[..., None], self: DataParallelPPOActor, *args: Any, **kwargs: Any) -> None:
    upstream(self, *args, **kwargs)
    self.device_name = "cpu"


@wrap(
    f"{_ACTOR}.compute_log_prob",
    feature=FULLY_SHARDED,
    why="FSDP2 leaves embeddings and output layer gathered after a forward, and only a backward would free them",
    upstream="https://github.com/pytorch/pytorch/pull/154704",
    remove_when="the pinned torch also frees the root where reshard_after_forward says so",
)
def compute_log_prob(upstream: Callable[..., Any], self: DataParallelPPOActor, *args: Any, **kwargs: Any) -> Any:
    from verl_patches.features.compatibility.fully_sharded import release

    log_probs = upstream(self, *args, **kwargs)
    release(self.actor_module)
    return log_probs


@wrap(
    f"{_ACTOR}.update_policy",
    feature=EXACT_LOSS,
    why="verl takes the mean of each micro batch, then that of micro batches and ranks: a token in a short batch "
    "counts for more, and gradients depend on how the batch was split",
    upstream="https://github.com/verl-project/verl/issues/5863",
    remove_when="the pinned verl's FSDP actor divides by the tokens and sequences of the whole mini batch",
    relies_on=["verl.trainer.ppo.core_algos:agg_loss"],
)
def update_policy(
    upstream: Callable[..., dict[str, Any]], self: DataParallelPPOActor, data: DataProto
) -> dict[str, Any]:
    from verl.utils.device import get_device_name

    from verl_patches.features.exact_loss.gradient_factors import OF_ACTOR, UpdateFactors

    config = self.config
    cut = None if config.use_dynamic_bsz else config.ppo_micro_batch_size_per_gpu
    mask = _counted(data.batch, data.meta_info).to(get_device_name())
    factors = UpdateFactors(config.loss_agg_mode, mask, config.ppo_mini_batch_size, cut)
    self.update_in_progress = factors, data.meta_info
    try:
        metrics = upstream(self, data)
    finally:
        del self.update_in_progress
    factors.report(metrics, OF_ACTOR)
    return metrics


@wrap(
    f"{_ACTOR}._forward_micro_batch",
    feature=EXACT_LOSS,
    why="the weight of a micro batch in its update's loss is applied to the gradients of its log-probs and entropies",
    upstream="https://github.com/verl-project/verl/issues/5863",
    remove_when="see update_policy",
    relies_on=[f"{_ACTOR}.update_policy"],
)
def forward_micro_batch(
    upstream: Callable[..., tuple[torch.Tensor | None, ...]],
    self: DataParallelPPOActor,
    micro_batch: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, ...]:
    entropy, log_probs = upstream(self, micro_batch, *args, **kwargs)
    in_progress = getattr(self, "update_in_progress", None)
    if in_progress is None:  # a pass for log-probs only
        return entropy, log_probs
    factors, about = in_progress
    return tuple(factors.weigh(_counted(micro_batch, about), entropy, log_probs))


@wrap(
    f"{_ACTOR}._forward_micro_batch",
    feature=WATCH,
    why="a phase of long answers takes longer than any hang detector waits; each finished micro batch counts as "
    "progress",
    outside=["exact_loss"],
)
def watched_forward_micro_batch(
    upstream: Callable[..., tuple[torch.Tensor | None, ...]],
    self: DataParallelPPOActor,
    micro_batch: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, ...]:
    from post_training.hang_detection.progress import finished_forward

    output = upstream(self, micro_batch, *args, **kwargs)
    finished_forward(output)
    return output


def _counted(batch: TensorDict | dict[str, Any], about: dict[str, Any]) -> torch.Tensor:
    """Return the mask of the response tokens that verl's loss counts: [rows, response length]."""
    column = "loss_mask" if about.get("multi_turn", False) else "attention_mask"
    return batch[column][:, -batch["responses"].size(1) :]


@wrap(
    f"{_ACTOR}._optimizer_step",
    feature=NONFINITE,
    why="verl skips an update with non-finite gradients and prints a line; a run must end with it counted",
    upstream="not forwarded: part of this project's features",
    remove_when="verl reports skipped updates as a metric",
)
def optimizer_step(upstream: Callable[..., torch.Tensor], self: DataParallelPPOActor) -> torch.Tensor:
    from verl_patches.features.measure.step_record import current_record

    norm = upstream(self)
    current_record().count("actor/nonfinite_steps", int(not norm.isfinite()))
    return norm
