"""verl's sharding manager between FSDP and vLLM: its time, and its memory apart from the rollout's."""

from overlay import wrap
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.watch.feature import WATCH

_MANAGER = "verl.workers.sharding_manager.fsdp_vllm:FSDPVLLMShardingManager"
_OURS = "not forwarded: part of this project's features"


@wrap(
    f"{_MANAGER}.__enter__",
    feature=MEASURE,
    why="time and memory of the weights' way into the rollout are figures of their own",
    upstream=_OURS,
    remove_when="never: it is this project's own record",
)
def enter(upstream, self):
    from verl_patches.features.measure.step_record import current_record
    from verl_patches.workers.process_residency import process_residency

    residency = process_residency()
    residency.enter("reshard")
    with current_record().timed("reshard"):
        upstream(self)
    residency.enter("rollout")


@wrap(
    f"{_MANAGER}.__exit__",
    feature=MEASURE,
    why="the rollout's memory is measured when it ends",
    upstream=_OURS,
    remove_when="never: it is this project's own record",
)
def leave(upstream, self, exc_type, exc_value, traceback):
    from verl_patches.workers.process_residency import process_residency

    upstream(self, exc_type, exc_value, traceback)
    process_residency().enter("idle")


@wrap(
    f"{_MANAGER}.__enter__",
    feature=WATCH,
    why="giving the rollout its weights lies inside verl's call for a generation, and has a limit of its own",
    upstream=_OURS,
    remove_when="never: it is this project's own watch",
    after=[f"{_MANAGER}.__enter__@measure"],
)
def enter_in_phase(upstream, self):
    from verl_patches.features import settings
    from verl_patches.features.watch.signs import in_phase

    return in_phase(settings.current().watch, "reshard", upstream, self)
