"""Patches of verl's Megatron actor: log-probs of its own forward as old_log_prob, their distance to the rollout's,
updates that skip non-finite gradients, dynamic micro batches, and exact losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features import settings
from verl_patches.features.chunked_log_probs.feature import CHUNKED_LOG_PROBS
from verl_patches.features.compatibility.feature import ENTROPY_BONUS, VERL_ON_NPU
from verl_patches.features.dynamic_batches.feature import DYNAMIC_BATCHES
from verl_patches.features.exact_loss.feature import EXACT_LOSS
from verl_patches.features.expert_sets.feature import EXPERT_SETS
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.nonfinite.feature import NONFINITE
from verl_patches.features.onpolicy.feature import ONPOLICY
from verl_patches.features.watch.feature import WATCH

if TYPE_CHECKING:
    import torch
    from verl import DataProto
    from verl.workers.actor.megatron_actor import MegatronPPOActor

_ACTOR = "verl.workers.actor.megatron_actor:MegatronPPOActor"
_SCHEDULE = "verl.workers.actor.megatron_actor:get_forward_backward_func"


@wrap(
    f"{_ACTOR}.make_minibatch_iterator",
    feature=MEASURE,
    evidence="executed",
    relies_on=["verl.protocol:DataProto.select"],
    why="verl drops the rollout's log-probs before the update, where training's own are known at no extra cost, and "
    "asks for an old_log_prob where the update uses its own",
    upstream="not forwarded: part of this project's features",
    remove_when="verl hands rollout_log_probs to the update",
)
def make_minibatch_iterator(
    upstream: Callable[..., Iterable[DataProto]], self: MegatronPPOActor, data: DataProto
) -> Iterable[DataProto]:
    from verl_patches.features.onpolicy.selection import UpdateColumns

    absent = () if settings.current().recompute_old_log_prob else ("old_log_probs",)
    return upstream(self, UpdateColumns(data, ("rollout_log_probs",), absent))


@wrap(
    _SCHEDULE,
    feature=MEASURE,
    evidence="executed",
    relies_on=[f"{_ACTOR}.forward_backward_batch"],
    why="the loss closes over the micro batch inside verl's method; Megatron's schedule sees training's log-probs and "
    "the rollout's",
    upstream="not forwarded: part of this project's features",
    remove_when="verl compares the log-probs of its update with the rollout's",
    only_here=True,
)
def get_measuring_forward_backward_func(upstream: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    from verl_patches.features.onpolicy.loss_hooks import with_measured_difference

    return with_measured_difference(upstream(), settings.current().recompute_old_log_prob)


@wrap(
    _SCHEDULE,
    feature=ONPOLICY,
    evidence="executed",
    relies_on=[f"{_ACTOR}.forward_backward_batch"],
    why="the loss closes over the micro batch inside verl's method; Megatron's schedule sees both",
    upstream="https://github.com/verl-project/verl/pull/3119",
    remove_when="the pinned verl takes log_prob.detach() for old_log_prob by itself",
    only_here=True,
)
def get_forward_backward_func(upstream: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    from verl_patches.features.onpolicy.loss_hooks import with_own_log_probs

    return with_own_log_probs(upstream())


@wrap(
    _SCHEDULE,
    feature=EXACT_LOSS,
    evidence="executed",
    relies_on=[f"{_ACTOR}.forward_backward_batch", "verl.trainer.ppo.core_algos:agg_loss"],
    why="verl takes the mean of each micro batch and Megatron the mean of those over micro batches and ranks: a token "
    "in a short batch counts for more, and gradients depend on how the batch was split",
    upstream="https://github.com/verl-project/verl/issues/5863",
    remove_when="the pinned verl's Megatron actor divides by the tokens and sequences of the whole mini batch",
    only_here=True,
)
def get_exact_forward_backward_func(upstream: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    from megatron.core import mpu

    from verl_patches.features.exact_loss.update_loss import with_exact_loss

    return with_exact_loss(upstream(), settings.current().loss_agg_mode, mpu.get_data_parallel_group())


@wrap(
    _SCHEDULE,
    feature=DYNAMIC_BATCHES,
    relies_on=[f"{_ACTOR}.forward_backward_batch"],
    why="verl 0.4.0 gives micro batches of different sizes the same weight in the loss, and the cluster's commit "
    "ignores the keys; in Megatron's schedule the batch can be split for both",
    upstream="https://github.com/verl-project/verl/pull/1617",
    remove_when="the pinned verl's Megatron actor splits by tokens and weights micro batches by their content",
    outside=["exact_loss", "measure", "onpolicy"],
    only_here=True,
)
def get_cutting_forward_backward_func(upstream: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    from verl_patches.features.dynamic_batches.micro_batches import agreement_of_ranks, with_dynamic_batches

    return with_dynamic_batches(upstream(), agreement_of_ranks())


@wrap(
    _SCHEDULE,
    feature=WATCH,
    relies_on=[f"{_ACTOR}.forward_backward_batch"],
    why="a phase of long answers takes longer than any hang detector waits; each finished micro batch counts as "
    "progress",
    outside=["dynamic_batches", "exact_loss", "measure", "onpolicy"],
    only_here=True,
    evidence="executed",
)
def get_watched_forward_backward_func(upstream: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    from post_training.hang_detection.progress import with_progress

    return with_progress(upstream())


@wrap(
    f"{_ACTOR}.forward_backward_batch",
    feature=DYNAMIC_BATCHES,
    why="sets how many tokens a micro batch of this pass may have, and passes the batch on whole",
    upstream="https://github.com/verl-project/verl/pull/1617",
    remove_when="see get_forward_backward_func",
)
def forward_backward_whole_batch(
    upstream: Callable[..., dict[str, Any]],
    self: MegatronPPOActor,
    data: DataProto,
    forward_only: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    from verl_patches.features.dynamic_batches.feature import TokenLimits
    from verl_patches.features.dynamic_batches.micro_batches import limited

    limits = TokenLimits.of(settings.current())
    of_a_pass = limits.old_log_prob if self.actor_optimizer is not None else limits.ref
    limit = of_a_pass if forward_only else limits.update
    if limit is None:
        return upstream(self, data, forward_only=forward_only, **kwargs)
    rows = len(data.batch)
    data.meta_info = {**data.meta_info, "micro_batch_size": rows}  # the cluster's commit reads it here
    asked = kwargs.get("use_dynamic_bsz")
    if asked is not None:
        kwargs.update(use_dynamic_bsz=False, micro_batch_size=rows)
    with limited(limit):
        output = upstream(self, data, forward_only=forward_only, **kwargs)
    if asked:
        output["indices"] = [range(rows)]  # in order already
    return output


@wrap(
    f"{_ACTOR}.forward_backward_batch",
    feature=EXPERT_SETS,
    evidence="executed",
    why="the experts to compare are those of the pass whose log-probs are compared with the rollout's",
    upstream="not forwarded: part of this project's features",
    remove_when="the pinned verl compares the experts of rollout and training",
)
def forward_backward_recorded(
    upstream: Callable[..., dict[str, Any]],
    self: MegatronPPOActor,
    data: DataProto,
    forward_only: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    from verl_patches.features.expert_sets.training import recorded_pass

    in_force = settings.current()
    compared = self.actor_optimizer is not None and forward_only == in_force.recompute_old_log_prob
    if not compared:
        return upstream(self, data, forward_only=forward_only, **kwargs)
    with recorded_pass(self.actor_module, self.tf_config, in_force.expert_sets.share):
        return upstream(self, data, forward_only=forward_only, **kwargs)


@wrap(
    f"{_ACTOR}.forward_backward_batch",
    feature=VERL_ON_NPU,
    evidence="executed",
    why="verl sends a batch as one storage of bytes, and torch_npu's deepcopy of a tensor takes the type with which "
    "its storage was created: the copy of position_ids for the labels is rejected",
    upstream="docs/upstream/torch-npu-deepcopy.md",
    remove_when="torch_npu copies a tensor whose storage was made with another type, or verl clones position_ids",
)
def forward_backward_batch(
    upstream: Callable[..., dict[str, Any]], self: MegatronPPOActor, data: DataProto, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    # A storage for each tensor. TensorDict's own clone adds 0 to all tensors at once, which CANN cannot do in 64 bits.
    data.batch = data.batch.apply(lambda tensor: tensor.clone())
    return upstream(self, data, *args, **kwargs)


@wrap(
    "verl.workers.actor.megatron_actor:vocab_parallel_entropy",
    feature=ENTROPY_BONUS,
    relies_on=[f"{_ACTOR}.forward_backward_batch"],
    why="Megatron's cross entropy writes into the logits that the entropy's backward needs, so every "
    "actor.entropy_coeff but 0 fails at the first update",
    upstream="https://github.com/verl-project/verl/pull/2484",
    remove_when="the pinned verl contains the fix",
    only_here=True,
)
def vocab_parallel_entropy(upstream: Callable[..., torch.Tensor], vocab_parallel_logits: torch.Tensor) -> torch.Tensor:
    # Without a backward the logits may be written into.
    return upstream(vocab_parallel_logits.clone() if vocab_parallel_logits.requires_grad else vocab_parallel_logits)


@wrap(
    "verl.workers.actor.megatron_actor:vocab_parallel_entropy",
    feature=CHUNKED_LOG_PROBS,
    relies_on=[f"{_ACTOR}.forward_backward_batch"],
    why="upstream's keeps two more tensors as large as all logits for its backward; the entropy of deferred logits "
    "comes with their log-probs",
    upstream="not forwarded: part of this project's features",
    remove_when="see gptmodel_forward",
    outside=["entropy_bonus"],
    only_here=True,
)
def entropy_of_deferred_logits(upstream: Callable[..., torch.Tensor], vocab_parallel_logits: Any) -> torch.Tensor:
    from verl_patches.features.chunked_log_probs.deferred import DeferredLogits

    if isinstance(vocab_parallel_logits, DeferredLogits):
        return vocab_parallel_logits.entropy()
    return upstream(vocab_parallel_logits)


@wrap(
    f"{_ACTOR}.update_policy",
    feature=NONFINITE,
    evidence="executed",
    relies_on=["megatron.core.optimizer.optimizer:ChainedOptimizer.step"],
    why="bfloat16 has no gradient scaler in Megatron, so inf and nan reach the weights; verl skips such steps on FSDP",
    upstream="docs/upstream/verl-megatron-nonfinite-gradients.md",
    remove_when="verl's Megatron actor skips steps with non-finite gradients",
)
def update_policy(
    upstream: Callable[..., dict[str, Any]], self: MegatronPPOActor, dataloader: Iterable[DataProto]
) -> dict[str, Any]:
    from verl_patches.features.nonfinite.updates import guarded

    return guarded(self, "actor", lambda: upstream(self, dataloader))
