"""verl's tracking writes every step to a file of JSON lines, without metrics that would be made up."""

from overlay import wrap
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT


@wrap(
    "verl.utils.tracking:Tracking.log",
    feature=MEASURE,
    evidence="executed",
    why="the summary and the live display read metrics.jsonl; verl derives some metrics from an absent old_log_prob",
    upstream="not forwarded: part of this project's features",
    remove_when="never: it is this project's own record",
)
def log(upstream, self, data, step, backend=None):
    import overlay
    from verl_patches.features import settings
    from verl_patches.features.measure.reported_names import true_metrics
    from verl_patches.features.measure.run_end import process_faults
    from verl_patches.features.measure.run_files import RunFiles
    from verl_patches.features.measure.samples import take_samples

    current = settings.current()
    metrics = true_metrics(data, old_log_prob_computed=current.recompute_old_log_prob)
    files = RunFiles(current.measure.output_dir)
    files.step(step, metrics)
    files.executed(overlay.executed())
    files.samples(step, take_samples())
    process_faults().logged(step, metrics, files)
    return upstream(self, data=metrics, step=step, backend=backend)


@wrap(
    "verl.utils.tracking:Tracking.log",
    feature=TRAINING_CHECKPOINT,
    evidence="executed",
    why="verl saves a step before it logs it; a checkpoint with its final name whose step has no metrics would leave a "
    "hole in the records of the run that goes on from it",
    upstream="not forwarded: part of this project's features",
    remove_when="verl logs a step before it saves it",
    after=["verl.utils.tracking:Tracking.log@measure"],
)
def log_then_publish(upstream, self, data, step, backend=None):
    logged = upstream(self, data=data, step=step, backend=backend)
    from verl_patches.features.training_checkpoint.trainer import process_publisher

    process_publisher().logged(step, data)
    return logged
