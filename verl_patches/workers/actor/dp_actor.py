"""verl's FSDP actor: float32 where it is asked for, and a count of the updates that it skips."""

from overlay import wrap
from verl_patches.features.nonfinite.feature import NONFINITE
from verl_patches.features.precision.feature import PRECISION

_ACTOR = "verl.workers.actor.dp_actor:DataParallelPPOActor"


@wrap(
    f"{_ACTOR}.__init__",
    feature=PRECISION,
    why="verl computes every forward under the device's autocast to bfloat16; under that of the host nothing is cast",
    upstream="not forwarded: float32 is for comparisons",
    remove_when="verl's FSDP actor reads the type of its autocast from the configuration",
    relies_on=[f"{_ACTOR}._forward_micro_batch"],
)
def init(upstream, self, *args, **kwargs):
    upstream(self, *args, **kwargs)
    self.device_name = "cpu"


@wrap(
    f"{_ACTOR}._optimizer_step",
    feature=NONFINITE,
    why="verl skips an update with non-finite gradients and prints a line; a run must end with it counted",
    upstream="not forwarded: part of this project's features",
    remove_when="verl reports skipped updates as a metric",
)
def optimizer_step(upstream, self):
    from verl_patches.features.measure.step_record import current_record

    norm = upstream(self)
    current_record().count("actor/nonfinite_steps", int(not norm.isfinite()))
    return norm
