"""Feature hooks of the training loop, in order: around its calls of the workers and around the whole training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from overlay import Feature, executed
from verl_patches.features import settings
from verl_patches.features.alerts.feature import ALERTS
from verl_patches.features.first_placement.feature import FIRST_PLACEMENT
from verl_patches.features.learning_rate.feature import LEARNING_RATE
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.overlong.feature import OVERLONG_FILTERING, OVERLONG_PENALTY
from verl_patches.features.profile.feature import PROFILE
from verl_patches.features.request_noise.feature import REQUEST_NOISE
from verl_patches.features.rollout_correction.feature import ROLLOUT_CORRECTION
from verl_patches.features.sample_handles.feature import SAMPLE_HANDLES
from verl_patches.features.step import Trainer
from verl_patches.features.tracking.feature import TRACKING
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT
from verl_patches.features.watch.feature import WATCH

Call = Callable[..., Any]
Additions = Mapping[str, Callable[[Call], Call]]
"""Decorators of calls, by the name of the call."""
GENERATE, LOG_PROBS, REFERENCE = "generate_sequences", "compute_log_prob", "compute_ref_log_prob"
UPDATE, UPDATE_CRITIC = "update_actor", "update_critic"
REWARD, VALIDATION_REWARD, LOG = "reward_fn", "val_reward_fn", "log"


@dataclass(frozen=True)
class Middleware:
    """The hooks of one feature.

    Attributes:
        feature: the feature.
        around: returns decorators of the calls above, by name, for a trainer whose workers are ready.
        before_workers: called before the workers exist.
        training: returns a context manager around the whole training.
        outside: features whose hooks this feature's hooks enclose.
    """

    feature: Feature
    around: Callable[[Trainer], Additions] = lambda trainer: {}
    before_workers: Callable[[Trainer], None] = lambda trainer: None
    training: Callable[[Trainer], AbstractContextManager[None]] = lambda trainer: nullcontext()
    outside: tuple[Feature, ...] = ()


def in_force() -> list[Middleware]:
    """Return the middleware of the active features, the nearest to the workers first."""
    return [each for each in MIDDLEWARE if each.feature.is_active()]


def dress(trainer: Trainer, middleware: list[Middleware]) -> None:
    """Decorate the calls of a trainer whose workers are ready."""
    in_actor = getattr(trainer, "ref_in_actor", False)  # the cluster's commit of verl has no LoRA
    owners = {name: trainer.actor_rollout_wg for name in (GENERATE, LOG_PROBS, UPDATE)}
    owners |= {name: trainer for name in (REWARD, VALIDATION_REWARD, LOG)}
    if trainer.use_reference_policy:
        owners[REFERENCE] = trainer.actor_rollout_wg if in_actor else trainer.ref_policy_wg
    if trainer.use_critic:
        owners[UPDATE_CRITIC] = trainer.critic_wg
    for each in middleware:
        for name, around in each.around(trainer).items():
            if name in owners:
                setattr(owners[name], name, around(getattr(owners[name], name)))


def _alerts(trainer: Trainer) -> Additions:
    """Report anomalous metrics when their step is logged, before its checkpoint is published; log the step before an
    alert ends the run."""
    from verl_patches.features.alerts.watcher import StoppedByAlert, process_alerts
    from verl_patches.features.training_checkpoint.trainer import process_publisher

    def logging(log: Call) -> Call:
        def run(metrics: dict[str, Any]) -> None:
            step = trainer.global_steps  # after a resume, verl's validation before training logs an old step again
            stop = process_alerts().take(step, metrics) if step > process_publisher().previous else ""
            log(metrics)
            if stop:
                raise StoppedByAlert(stop)

        return run

    return {LOG: logging}


def _until_an_alert(trainer: Trainer) -> AbstractContextManager[None]:
    from verl_patches.features.alerts.watcher import alerts_of_run
    from verl_patches.features.measure.run_files import RunFiles

    current = settings.current()
    return alerts_of_run(current, RunFiles(current.measure.output_dir).alert, trainer)


def _checkpoint(trainer: Trainer) -> Additions:
    """Finish the previous step's checkpoint before an update: its tensors may still be being written."""
    from verl_patches.features.training_checkpoint.trainer import process_publisher

    return dict.fromkeys((UPDATE, UPDATE_CRITIC), process_publisher().finishing_first)


def _to_the_last_checkpoint(trainer: Trainer) -> AbstractContextManager[None]:
    from ray.exceptions import RayError

    from verl_patches.features.training_checkpoint.trainer import process_publisher

    return process_publisher().finishing_at_end(unreachable=RayError)


def _handles(trainer: Trainer) -> Additions:
    """Keep generated samples with the workers, and send them sample ids only."""
    import ray

    from verl_patches.features.sample_handles.handles import DriverOfHandles

    driver = DriverOfHandles(ray.put, lambda: trainer.global_steps)
    asking = dict.fromkeys((LOG_PROBS, REFERENCE), driver.asking)
    return {GENERATE: driver.generating, **asking, UPDATE: driver.updating}


def _placement(trainer: Trainer) -> Additions:
    """Distribute prompts among engines by the lengths of their last answers."""
    from verl_patches.features.first_placement.driver import STATE, Placement
    from verl_patches.features.training_checkpoint.kept_states import process_kept_states

    ranks, engine = trainer.actor_rollout_wg.world_size, trainer.config.actor_rollout_ref.rollout
    placement = Placement(ranks // engine.tensor_model_parallel_size)
    process_kept_states().register(STATE, placement.state, placement.restore)
    return {GENERATE: placement.placing}


def _seeds(trainer: Trainer) -> Additions:
    """Send a seed with every prompt, so that its samples do not depend on the engine that it is sent to."""
    from verl_patches.features.partial_rollout.columns import ROWS
    from verl_patches.features.request_noise.seeds import Seeds

    seed = trainer.config.actor_rollout_ref.rollout.get("seed") or 0
    return {GENERATE: Seeds(seed, lambda: trainer.global_steps, ROWS).sending}


def _number_of_the_step(trainer: Trainer) -> Additions:
    """Send the number of the step with updates, because the learning rate depends on it."""
    from verl_patches.features.learning_rate.rates import sending_step

    return dict.fromkeys((UPDATE, UPDATE_CRITIC), partial(sending_step, step=lambda: trainer.global_steps))


def _without_truncated(trainer: Trainer) -> Additions:
    """Leave truncated answers out of every loss."""
    from verl_patches.features.overlong.filtering import filtering

    return dict.fromkeys((UPDATE, UPDATE_CRITIC), partial(filtering, end_tokens=trainer.end_tokens().tokens))


def _measure(trainer: Trainer) -> Additions:
    """Score answers together, report batch metrics with the update, and write each step when it is logged."""
    from verl_patches.features.critic.warmup import ending_warmup
    from verl_patches.features.measure.batch_metrics import with_batch_metrics
    from verl_patches.features.measure.judged_rewards import judged_together
    from verl_patches.features.measure.run_end import record_step
    from verl_patches.features.measure.run_files import RunFiles
    from verl_patches.features.temperature.feature import narrowed_by

    files, ends = RunFiles(MEASURE.current().output_dir), trainer.end_tokens()
    files.note("models_ready")
    print(f"{ends}.")
    narrowed = narrowed_by(trainer.config.actor_rollout_ref.rollout)
    if narrowed:
        by = ", ".join(f"{name}={value}" for name, (value, _) in narrowed.items())
        print(f"Answers are drawn by {by}, but trained and compared as samples of the whole distribution.")

    def reporting(update: Call) -> Call:
        return with_batch_metrics(update, ends.tokens, lambda: trainer.source.metrics)

    def recording(log: Call) -> Call:
        def run(metrics: dict[str, Any]) -> None:
            record_step(trainer.global_steps, metrics, executed(), files)
            log(metrics)

        return run

    return {
        REWARD: judged_together,
        VALIDATION_REWARD: judged_together,
        UPDATE: reporting,
        UPDATE_CRITIC: ending_warmup(trainer, reporting),
        LOG: recording,
    }


@contextmanager
def _with_faults(trainer: Trainer) -> Iterator[None]:
    """Make the run fail at its end if there were faults that verl tolerates."""
    from verl_patches.features.measure.run_end import faults_of_run
    from verl_patches.features.measure.run_files import RunFiles

    RunFiles(MEASURE.current().output_dir).note("training_begins")
    with faults_of_run(settings.current(), lambda: getattr(trainer, "global_steps", 0)):
        yield


def _penalty(trainer: Trainer) -> Additions:
    from verl_patches.features.overlong.feature import OverlongBuffer
    from verl_patches.features.overlong.penalty import with_penalty

    return {REWARD: partial(with_penalty, buffer=OverlongBuffer.of(trainer.config))}


def _correction(trainer: Trainer) -> Additions:
    """Weight advantages by how far training's policy is from the rollout's."""
    from verl_patches.features.rollout_correction.weights import correcting

    return {UPDATE: partial(correcting, cap=ROLLOUT_CORRECTION.current().cap)}


def _profile(trainer: Trainer) -> Additions:
    """Record the chosen steps on the workers, from the first generation to the update."""
    from verl_patches.features.critic.warmup import ending_warmup
    from verl_patches.features.profile.steps import ProfiledSteps

    chosen, tell = PROFILE.current().steps, trainer.actor_rollout_wg.profile_step
    steps = ProfiledSteps(chosen, lambda: trainer.global_steps, tell)
    return {
        GENERATE: steps.beginning_first,
        UPDATE: steps.ending_after,
        UPDATE_CRITIC: ending_warmup(trainer, steps.ending_after),
    }


def _with_trackers(trainer: Trainer) -> AbstractContextManager[None]:
    from verl_patches.features.tracking.run import closed_at_the_end

    return closed_at_the_end()


def _give_signs_of_life(trainer: Trainer) -> None:
    """Send heartbeats from the training loop too, because it can hang like its workers."""
    from post_training.hang_detection.progress import count_answers
    from post_training.hang_detection.signs import TRAINER, start_in_ray

    for manager in (trainer.reward_fn, trainer.val_reward_fn):
        count_answers(manager)
    start_in_ray(TRAINER, WATCH.current().interval_s)


def _watched(trainer: Trainer) -> AbstractContextManager[None]:
    """Put the loop's own work between its calls of the workers into the phase `driver`, which has a time limit too."""
    from post_training.hang_detection.signs import process_signs

    process_signs().step = lambda: getattr(trainer, "global_steps", None)
    return process_signs().phase("driver")


MIDDLEWARE = (
    Middleware(ALERTS, around=_alerts, training=_until_an_alert),
    Middleware(TRAINING_CHECKPOINT, around=_checkpoint, training=_to_the_last_checkpoint, outside=(ALERTS,)),
    Middleware(SAMPLE_HANDLES, around=_handles),
    Middleware(FIRST_PLACEMENT, around=_placement, outside=(SAMPLE_HANDLES,)),
    Middleware(REQUEST_NOISE, around=_seeds, outside=(FIRST_PLACEMENT, SAMPLE_HANDLES)),
    Middleware(LEARNING_RATE, around=_number_of_the_step, outside=(SAMPLE_HANDLES,)),
    Middleware(OVERLONG_FILTERING, around=_without_truncated, outside=(SAMPLE_HANDLES, LEARNING_RATE)),
    Middleware(
        MEASURE,
        around=_measure,
        training=_with_faults,
        outside=(ALERTS, TRAINING_CHECKPOINT, SAMPLE_HANDLES, OVERLONG_FILTERING),
    ),
    Middleware(OVERLONG_PENALTY, around=_penalty, outside=(MEASURE,)),
    Middleware(ROLLOUT_CORRECTION, around=_correction, outside=(MEASURE,)),
    Middleware(PROFILE, around=_profile, outside=(MEASURE, SAMPLE_HANDLES)),
    Middleware(TRACKING, training=_with_trackers, outside=(MEASURE,)),
    Middleware(WATCH, before_workers=_give_signs_of_life, training=_watched, outside=(TRACKING,)),
)
"""From the innermost, nearest to the workers, to the outermost."""
