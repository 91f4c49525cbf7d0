"""verl's Megatron actor: log-probs of its own forward as old_log_prob, their distance to the rollout's, safe steps."""

from overlay import wrap
from verl_patches.features.compatibility.feature import VERL_ON_NPU
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.nonfinite.feature import NONFINITE
from verl_patches.features.onpolicy.feature import ONPOLICY

_ACTOR = "verl.workers.actor.megatron_actor:MegatronPPOActor"


@wrap(
    f"{_ACTOR}.make_minibatch_iterator",
    feature=MEASURE,
    evidence="executed",
    relies_on=["verl.protocol:DataProto.select"],
    why="verl drops the rollout's log-probs before the update, where training's own are known at no extra cost",
    upstream="not forwarded: part of this project's features",
    remove_when="verl hands rollout_log_probs to the update",
)
def make_minibatch_iterator(upstream, self, data):
    from verl_patches.features.onpolicy.selection import AlsoSelecting

    return upstream(self, AlsoSelecting(data, ("rollout_log_probs",)))


@wrap(
    "verl.workers.actor.megatron_actor:get_forward_backward_func",
    feature=MEASURE,
    evidence="executed",
    relies_on=[f"{_ACTOR}.forward_backward_batch"],
    why="the loss closes over the micro batch inside verl's method; Megatron's schedule is where training's log-probs "
    "and the rollout's pass by",
    upstream="not forwarded: part of this project's features",
    remove_when="verl compares the log-probs of its update with the rollout's",
    only_here=True,
)
def get_measuring_forward_backward_func(upstream):
    from verl_patches.features.onpolicy.schedule import with_measured_difference

    return with_measured_difference(upstream())


@wrap(
    "verl.workers.actor.megatron_actor:get_forward_backward_func",
    feature=ONPOLICY,
    evidence="executed",
    relies_on=[f"{_ACTOR}.forward_backward_batch"],
    why="the loss closes over the micro batch inside verl's method; Megatron's schedule is where both pass by",
    upstream="https://github.com/verl-project/verl/pull/3119",
    remove_when="the pinned verl takes log_prob.detach() for old_log_prob by itself",
    only_here=True,
)
def get_forward_backward_func(upstream):
    from verl_patches.features import settings
    from verl_patches.features.onpolicy.schedule import with_own_log_probs

    schedule = upstream()
    return schedule if settings.current().recompute_old_log_prob else with_own_log_probs(schedule)


@wrap(
    f"{_ACTOR}.forward_backward_batch",
    feature=VERL_ON_NPU,
    evidence="executed",
    why="verl sends a batch as one storage of bytes, and torch_npu's deepcopy of a tensor takes the type that its "
    "storage was made with: the copy of position_ids for the labels is refused",
    upstream="docs/upstream/torch-npu-deepcopy.md",
    remove_when="torch_npu copies a tensor whose storage was made with another type, or verl clones position_ids",
)
def forward_backward_batch(upstream, self, data, *args, **kwargs):
    data.batch = data.batch.clone()  # a storage for each tensor
    return upstream(self, data, *args, **kwargs)


@wrap(
    f"{_ACTOR}.update_policy",
    feature=NONFINITE,
    evidence="executed",
    relies_on=["megatron.core.optimizer.optimizer:ChainedOptimizer.step"],
    why="bfloat16 has no gradient scaler in Megatron, so inf and nan reach the weights; verl skips such steps on FSDP",
    upstream="docs/upstream/verl-megatron-nonfinite-gradients.md",
    remove_when="verl's Megatron actor skips steps with non-finite gradients",
)
def update_policy(upstream, self, dataloader):
    from verl_patches.features import settings

    if not settings.current().nonfinite.enabled:
        return upstream(self, dataloader)
    from verl_patches.features.measure.step_record import current_record
    from verl_patches.features.nonfinite.guard import NonfiniteGuard
    from verl_patches.features.nonfinite.weights import check_weights
    from verl_patches.features.residency.holdings import gradient_tensors

    optimizer = self.actor_optimizer
    self.actor_optimizer = guard = NonfiniteGuard(optimizer, lambda: gradient_tensors(self.actor_module))
    try:
        metrics = upstream(self, dataloader)
    finally:
        self.actor_optimizer = optimizer
        current_record().count("actor/nonfinite_steps", guard.skipped)
    if guard.skipped:  # on all ranks or on none; bad weights make every later update one to skip
        check_weights(
            self.actor_module, "after an update that was skipped, the actor's weights", "begin from weights before that"
        )
    return metrics
