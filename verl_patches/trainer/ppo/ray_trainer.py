"""verl's driver: its prompts and how they are chosen, calls that need no worker, and marks of how far a run is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features import settings
from verl_patches.features.alerts.feature import ALERTS
from verl_patches.features.compatibility.feature import SETTINGS
from verl_patches.features.data_order.feature import DATA_ORDER
from verl_patches.features.dynamic_sampling.feature import DYNAMIC_SAMPLING
from verl_patches.features.first_placement.feature import FIRST_PLACEMENT
from verl_patches.features.learning_rate.feature import LEARNING_RATE
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.onpolicy.feature import ONPOLICY
from verl_patches.features.overlong.feature import OVERLONG_FILTERING, OVERLONG_PENALTY
from verl_patches.features.partial_rollout.feature import PARTIAL_ROLLOUT
from verl_patches.features.profile.feature import PROFILE
from verl_patches.features.request_noise.feature import REQUEST_NOISE
from verl_patches.features.rollout_correction.feature import ROLLOUT_CORRECTION
from verl_patches.features.sample_handles.feature import SAMPLE_HANDLES
from verl_patches.features.tracking.feature import TRACKING
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT
from verl_patches.features.watch.feature import WATCH

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch.utils.data import Dataset, Sampler
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    from post_training.end_tokens import EndTokens
    from verl_patches.features.data_order.order import DataOrder

_MODULE = "verl.trainer.ppo.ray_trainer"
_TRAINER = f"{_MODULE}:RayPPOTrainer"
_OWN_RECORD = {
    "upstream": "not forwarded: part of this project's features",
    "remove_when": "never: it is this project's own record",
}


@wrap(
    f"{_TRAINER}.__init__",
    feature=SETTINGS,
    evidence="executed",
    why="the driver refuses what cannot run before any worker starts, and decides by the overlay's settings too",
    upstream="not forwarded: part of this project's features",
    remove_when="never: it is how this project is configured",
)
def init(upstream: Callable[..., None], self: RayPPOTrainer, config: DictConfig, *args: Any, **kwargs: Any) -> None:
    from verl_patches.trainer.configuration_checks import check_configuration

    if "overlay" not in config.actor_rollout_ref:  # the program is neither ours nor verl's own command
        from omegaconf import OmegaConf

        from verl_patches.trainer.verl_command import completed

        config = completed(config)
        OmegaConf.resolve(config)  # as verl's task runner has done with the rest
    settings.activate(check_configuration(config))
    upstream(self, config, *args, **kwargs)


@wrap(
    f"{_TRAINER}.__init__",
    feature=MEASURE,
    evidence="executed",
    why="when this ends the data are ready, which is a part of the start-up time that a run reports",
    inside=["settings"],
    **_OWN_RECORD,
)
def init_noted(
    upstream: Callable[..., None], self: RayPPOTrainer, config: DictConfig, *args: Any, **kwargs: Any
) -> None:
    upstream(self, config, *args, **kwargs)
    _note("data_ready")


@wrap(
    f"{_TRAINER}._create_dataloader",
    feature=DATA_ORDER,
    evidence="executed",
    relies_on=[f"{_TRAINER}.fit", "verl.trainer.main_ppo:create_rl_sampler"],
    why="verl's sampler keeps no epoch, so a resume in a later epoch goes through the first one's order again; fit "
    "counts epochs from 0 and trains one step more after a resume at the end",
    upstream="not forwarded: torch's RandomSampler has no state, which accelerate#4195 reports of another trainer",
    remove_when="a resume of the pinned verl continues in the order of the unbroken run in every epoch",
)
def create_dataloader(
    upstream: Callable[..., None],
    self: RayPPOTrainer,
    train_dataset: Dataset | None,
    val_dataset: Dataset | None,
    collate_fn: Callable[..., Any] | None,
    train_sampler: Sampler | None,
) -> None:
    from verl_patches.features.data_order.loader import ResumableLoader
    from verl_patches.features.data_order.order import PlacedSampler

    data = self.config.data

    def order() -> DataOrder:
        return _order_of(self, data.get("gen_batch_size", data.train_batch_size))

    sampler = PlacedSampler(order)
    upstream(self, train_dataset, val_dataset, collate_fn, sampler)
    self.train_dataloader = ResumableLoader(self.train_dataloader, sampler, order(), self.total_training_steps)


def _order_of(trainer: RayPPOTrainer, batch: int) -> DataOrder:
    """The order in which a trainer goes through its data, in batches of `batch` rows."""
    from verl_patches.features.data_order.order import DataOrder

    data = trainer.config.data
    return DataOrder(len(trainer.train_dataset), batch, data.get("seed", 1) if data.shuffle else None)


@wrap(
    f"{_TRAINER}._create_dataloader",
    feature=DYNAMIC_SAMPLING,
    relies_on=[f"{_TRAINER}.fit"],
    why="prompts whose answers are all right or all wrong teach nothing, and fit trains on whatever its loader gives",
    upstream="https://github.com/verl-project/verl/pull/7082",
    remove_when="the pinned verl's fit filters groups on Megatron and FSDP and loses no prompt",
    outside=["data_order"],
)
def create_prompt_source(
    upstream: Callable[..., None],
    self: RayPPOTrainer,
    train_dataset: Dataset | None,
    val_dataset: Dataset | None,
    collate_fn: Callable[..., Any] | None,
    train_sampler: Sampler | None,
) -> None:
    from verl.utils.dataset.rl_dataset import collate_fn as default_collate_fn

    from verl_patches.features.dynamic_sampling.feature import FilterGroups
    from verl_patches.features.dynamic_sampling.queue import PromptQueue
    from verl_patches.features.dynamic_sampling.source import PromptSource, Sizes, put_in_force

    upstream(self, train_dataset, val_dataset, collate_fn, train_sampler)
    data, answers = self.config.data, self.config.actor_rollout_ref.rollout.n
    size = data.train_batch_size
    queue = PromptQueue(_order_of(self, size), self.config.trainer.total_epochs)
    sizes = Sizes(size, data.get("gen_batch_size") or 3 * size, answers, self.total_training_steps)
    chosen, collate = FilterGroups.of(self.config), collate_fn or default_collate_fn
    self.train_dataloader = PromptSource(self.train_dataset, collate, queue, chosen, sizes)
    put_in_force(self.train_dataloader)


@wrap(
    f"{_TRAINER}._create_dataloader",
    feature=PARTIAL_ROLLOUT,
    relies_on=[f"{_TRAINER}.fit"],
    why="which of the prompts in flight a step trains on is known after its rollout, and fit's loader chooses before",
    upstream="not forwarded: verl has partial rollouts in its asynchronous trainers only",
    remove_when="the pinned verl's fit can leave answers and take them up, on Megatron too",
    outside=["data_order", "dynamic_sampling"],
)
def create_source_of_finished(
    upstream: Callable[..., None],
    self: RayPPOTrainer,
    train_dataset: Dataset | None,
    val_dataset: Dataset | None,
    collate_fn: Callable[..., Any] | None,
    train_sampler: Sampler | None,
) -> None:
    from verl.utils.dataset.rl_dataset import collate_fn as default_collate_fn

    from post_training.plan.partial_rollout import PartialRollout
    from verl_patches.features.dynamic_sampling.queue import PromptQueue
    from verl_patches.features.dynamic_sampling.source import put_in_force
    from verl_patches.features.partial_rollout.source import SourceOfFinished

    upstream(self, train_dataset, val_dataset, collate_fn, train_sampler)
    size, chosen = self.config.data.train_batch_size, settings.current().partial_rollout
    order = _order_of(self, size)
    queue = PromptQueue(order, self.config.trainer.total_epochs, used=order.batches * size)
    policy = PartialRollout(size, chosen.threshold, chosen.max_steps)
    source = SourceOfFinished(
        self.train_dataset,
        collate_fn or default_collate_fn,
        queue,
        policy,
        self.config.actor_rollout_ref.rollout.n,
        self.total_training_steps,
    )
    self.train_dataloader = source
    put_in_force(source)


@wrap(
    f"{_MODULE}:_timer",
    feature=DYNAMIC_SAMPLING,
    relies_on=[f"{_TRAINER}.fit"],
    why="the step's answers are generated and scored before fit's own timers of it begin",
    upstream="not forwarded: part of this project's features",
    remove_when="see _create_dataloader",
)
def timer(
    upstream: Callable[..., AbstractContextManager[None]], name: str, timing_raw: dict[str, float]
) -> AbstractContextManager[None]:
    return _timer_of_source(upstream, name, timing_raw)


@wrap(
    f"{_MODULE}:_timer",
    feature=PARTIAL_ROLLOUT,
    relies_on=[f"{_TRAINER}.fit"],
    why="the step's answers are generated before fit's own timers of it begin",
    upstream="not forwarded: part of this project's features",
    remove_when="see _create_dataloader",
    outside=["dynamic_sampling"],
)
def timer_of_finished(
    upstream: Callable[..., AbstractContextManager[None]], name: str, timing_raw: dict[str, float]
) -> AbstractContextManager[None]:
    return _timer_of_source(upstream, name, timing_raw)


def _timer_of_source(
    upstream: Callable[..., AbstractContextManager[None]], name: str, timing_raw: dict[str, float]
) -> AbstractContextManager[None]:
    from verl_patches.features.dynamic_sampling.source import current_source
    from verl_patches.features.dynamic_sampling.timers import with_seconds_before

    source = current_source()
    assert source is not None, "_create_dataloader has put one in force"
    return with_seconds_before(upstream(name, timing_raw), timing_raw, name, source.seconds)


@wrap(
    f"{_TRAINER}.init_workers",
    feature=SAMPLE_HANDLES,
    evidence="executed",
    relies_on=[f"{_TRAINER}.fit"],
    why="fit sends every worker padded tokens that workers have generated, one worker after the other",
    upstream="https://github.com/volcengine/verl/issues/2299",
    remove_when="the pinned verl moves the columns of a batch between colocated workers without the driver",
)
def init_workers_that_keep_samples(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    import ray

    from verl_patches.features.sample_handles.handles import DriverOfHandles

    upstream(self)
    driver, workers = DriverOfHandles(ray.put, lambda: self.global_steps), self.actor_rollout_wg
    workers.generate_sequences = driver.generating(workers.generate_sequences)
    workers.compute_log_prob = driver.asking(workers.compute_log_prob)
    workers.update_actor = driver.updating(workers.update_actor)
    if self.use_reference_policy:
        in_actor = getattr(self, "ref_in_actor", False)  # verl's commit of the cluster knows no LoRA
        of_reference = workers if in_actor else self.ref_policy_wg
        of_reference.compute_ref_log_prob = driver.asking(of_reference.compute_ref_log_prob)


@wrap(
    f"{_TRAINER}.init_workers",
    feature=FIRST_PLACEMENT,
    relies_on=[f"{_TRAINER}.fit"],
    why="verl deals prompts out to engines in the order of its batch, so that one may get all the long answers",
    upstream="not forwarded: part of this project's features",
    remove_when="the pinned verl deals prompts out by the lengths of their answers",
    outside=["sample_handles"],
)
def init_workers_by_length(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    from verl_patches.features.first_placement.driver import STATE, Placement
    from verl_patches.features.training_checkpoint.kept_states import process_kept_states

    upstream(self)
    workers = self.actor_rollout_wg
    placement = Placement(workers.world_size // self.config.actor_rollout_ref.rollout.tensor_model_parallel_size)
    process_kept_states().register(STATE, placement.state, placement.restore)
    workers.generate_sequences = placement.placing(workers.generate_sequences)


@wrap(
    f"{_TRAINER}.init_workers",
    feature=REQUEST_NOISE,
    relies_on=[f"{_TRAINER}.fit"],
    why="an engine would give a prompt the next of its own seeds, so that what a prompt samples depends on the engine "
    "that it is sent to and on what was sent there before",
    upstream="not forwarded: part of this project's features",
    remove_when="vLLM gives every request random numbers of its own",
    outside=["first_placement", "sample_handles"],
)
def init_workers_that_seed_requests(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    from verl_patches.features.partial_rollout.columns import ROWS
    from verl_patches.features.request_noise.seeds import Seeds

    upstream(self)
    workers, seed = self.actor_rollout_wg, self.config.actor_rollout_ref.rollout.get("seed") or 0
    seeds = Seeds(seed, lambda: self.global_steps, ROWS)
    workers.generate_sequences = seeds.sending(workers.generate_sequences)


@wrap(
    f"{_TRAINER}.init_workers",
    feature=ONPOLICY,
    evidence="executed",
    relies_on=[f"{_TRAINER}.fit"],
    why="fit always calls compute_log_prob; answered here, no worker runs a forward and no batch is sent",
    upstream="https://github.com/verl-project/verl/issues/3996",
    remove_when="the pinned verl can leave out old_log_prob for on-policy batches",
    outside=["sample_handles"],
)
def init_workers(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    upstream(self)
    self.actor_rollout_wg.compute_log_prob = _absent_log_prob


@wrap(
    f"{_TRAINER}.init_workers",
    feature=LEARNING_RATE,
    evidence="executed",
    relies_on=[f"{_TRAINER}.fit"],
    why="the learning rate depends on the number of the step, which fit does not send with the batch",
    upstream="not forwarded: part of this project's features",
    remove_when="the pinned verl's fit sends the number of the step with the batch",
    outside=["onpolicy", "sample_handles"],
)
def init_workers_that_know_the_step(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    upstream(self)
    from verl_patches.features.learning_rate.rates import sending_step

    workers = self.actor_rollout_wg
    workers.update_actor = sending_step(workers.update_actor, lambda: self.global_steps)
    if getattr(self, "use_critic", False):
        self.critic_wg.update_critic = sending_step(self.critic_wg.update_critic, lambda: self.global_steps)


@wrap(
    f"{_TRAINER}.init_workers",
    feature=OVERLONG_FILTERING,
    relies_on=[f"{_TRAINER}.fit"],
    why="verl's loss counts answers that were cut like any other",
    upstream="not forwarded: part of this project's features",
    remove_when="the pinned verl's fit can leave out answers that were cut",
    outside=["learning_rate", "sample_handles"],
)
def init_workers_that_filter_truncated(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    from verl_patches.features.overlong.filtering import filtering

    upstream(self)
    workers, ends = self.actor_rollout_wg, _end_tokens(self).tokens
    workers.update_actor = filtering(workers.update_actor, ends)
    if getattr(self, "use_critic", False):
        self.critic_wg.update_critic = filtering(self.critic_wg.update_critic, ends)


@wrap(
    f"{_TRAINER}.init_workers",
    feature=MEASURE,
    evidence="executed",
    relies_on=[f"{_TRAINER}.fit"],
    why="which groups carry a gradient and which answers were cut is known on the driver alone; and when this ends the "
    "models are ready, which is a part of the start-up time that a run reports",
    outside=["learning_rate", "sample_handles", "overlong_filtering"],
    **_OWN_RECORD,
)
def init_workers_that_report_the_batch(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    upstream(self)
    _note("models_ready")
    from verl_patches.features.critic.warmup import ending_warmup
    from verl_patches.features.dynamic_sampling.source import current_source
    from verl_patches.features.measure.batch_figures import with_batch_figures
    from verl_patches.features.measure.judged_rewards import judged_together
    from verl_patches.features.temperature.feature import narrowed_by

    self.reward_fn, self.val_reward_fn = judged_together(self.reward_fn), judged_together(self.val_reward_fn)

    def of_the_source() -> Mapping[str, float]:
        source = current_source()
        return {} if source is None else source.figures

    ends = _end_tokens(self)
    print(f"{ends}.")
    narrowed = narrowed_by(self.config.actor_rollout_ref.rollout)
    if narrowed:
        by = ", ".join(f"{name}={value}" for name, (value, _) in narrowed.items())
        print(f"Answers are drawn by {by}, and trained and compared as samples of the whole distribution.")

    def reporting(update: Callable[[DataProto], DataProto]) -> Callable[[DataProto], DataProto]:
        return with_batch_figures(update, ends.tokens, of_the_source)

    workers = self.actor_rollout_wg
    workers.update_actor = reporting(workers.update_actor)
    ending_warmup(self, reporting)


@wrap(
    f"{_TRAINER}.init_workers",
    feature=OVERLONG_PENALTY,
    relies_on=[f"{_TRAINER}.fit"],
    why="verl's penalty belongs to a reward manager that main_ppo cannot configure",
    upstream="not forwarded: verl's recipe for DAPO, which copies fit, has the penalty",
    remove_when="the pinned verl's fit reads reward_model.overlong_buffer",
    outside=["measure"],
)
def init_workers_with_penalty(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    from verl_patches.features.overlong.feature import OverlongBuffer
    from verl_patches.features.overlong.penalty import with_penalty

    upstream(self)
    self.reward_fn = with_penalty(self.reward_fn, OverlongBuffer.of(self.config))


@wrap(
    f"{_TRAINER}.init_workers",
    feature=ROLLOUT_CORRECTION,
    relies_on=[f"{_TRAINER}.fit"],
    why="verl takes what the rollout sampled for samples of training's own policy, from which its kernels differ",
    upstream="https://github.com/verl-project/verl/pull/2953",
    remove_when="the pinned verl has truncated importance sampling (actor.tis_imp_ratio_cap, or rollout correction)",
    outside=["measure"],
)
def init_workers_that_correct(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    from verl_patches.features.rollout_correction.weights import correcting

    upstream(self)
    workers = self.actor_rollout_wg
    workers.update_actor = correcting(workers.update_actor, settings.current().rollout_correction.cap)


@wrap(
    f"{_TRAINER}.init_workers",
    feature=PROFILE,
    evidence="executed",
    relies_on=[f"{_TRAINER}.fit"],
    why="which step is being trained is known on the driver alone, and workers record on its word",
    upstream="https://github.com/verl-project/verl/pull/2194",
    remove_when="the pinned verl has global_profiler with torch_npu's profiler",
    outside=["measure"],
)
def init_workers_that_are_profiled(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    from verl_patches.features.critic.warmup import ending_warmup
    from verl_patches.features.profile.steps import ProfiledSteps

    upstream(self)
    workers = self.actor_rollout_wg
    steps = ProfiledSteps(settings.current().profile.steps, lambda: self.global_steps, workers.profile_step)
    workers.generate_sequences = steps.beginning_first(workers.generate_sequences)
    workers.update_actor = steps.ending_after(workers.update_actor)
    ending_warmup(self, steps.ending_after)


@wrap(
    f"{_TRAINER}.init_workers",
    feature=DYNAMIC_SAMPLING,
    relies_on=[f"{_TRAINER}.fit"],
    why="fit generates for every batch of its loader and scores it, which has been done when the batch was chosen",
    upstream="not forwarded: part of this project's features",
    remove_when="see _create_dataloader",
    outside=["overlong_penalty", "overlong_filtering", "profile", "request_noise", "first_placement"],
)
def init_workers_of_the_source(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    from verl_patches.features.dynamic_sampling.source import Workers

    upstream(self)
    source, workers, reward_fn = self.train_dataloader, self.actor_rollout_wg, self.reward_fn

    def reward(answers: DataProto) -> Any:
        from verl.trainer.ppo.reward import compute_reward

        return compute_reward(answers, reward_fn)

    source.connect(Workers(workers.generate_sequences, workers.world_size, reward))
    workers.generate_sequences, self.reward_fn = source.answering, source.stored_reward(reward_fn)


@wrap(
    f"{_TRAINER}.init_workers",
    feature=PARTIAL_ROLLOUT,
    relies_on=[f"{_TRAINER}.fit"],
    why="fit generates for every batch of its loader, which has been done when the batch was chosen",
    upstream="not forwarded: part of this project's features",
    remove_when="see _create_dataloader",
    outside=["dynamic_sampling"],
)
def init_workers_of_finished(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    upstream(self)
    source, workers = self.train_dataloader, self.actor_rollout_wg
    source.connect(workers.generate_sequences, workers.world_size)
    workers.generate_sequences = source.answering


@wrap(
    f"{_TRAINER}.init_workers",
    feature=TRAINING_CHECKPOINT,
    evidence="executed",
    relies_on=[f"{_TRAINER}.fit"],
    why="an update changes what the checkpoint of the step before it may still be being written from",
    upstream="not forwarded: part of this project's features",
    remove_when="see _save_checkpoint",
    outside=["dynamic_sampling"],
)
def init_workers_that_finish_a_checkpoint(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    upstream(self)
    from verl_patches.features.training_checkpoint.trainer import process_publisher

    workers, publisher = self.actor_rollout_wg, process_publisher()
    workers.update_actor = publisher.finishing_first(workers.update_actor)
    if getattr(self, "use_critic", False):
        self.critic_wg.update_critic = publisher.finishing_first(self.critic_wg.update_critic)


@wrap(
    f"{_TRAINER}.fit",
    feature=DYNAMIC_SAMPLING,
    why="fit validates and saves at its last step alone, which a run whose prompts are used up does not reach",
    upstream="not forwarded: part of this project's features",
    remove_when="see _create_dataloader",
)
def fit_while_prompts_last(upstream: Callable[..., Any], self: RayPPOTrainer) -> Any:
    from verl_patches.features.dynamic_sampling.ending import end_early

    fitted = upstream(self)
    if self.train_dataloader.ended_by is not None:
        end_early(self, self.train_dataloader.ended_by)
    return fitted


@wrap(
    f"{_TRAINER}._save_checkpoint",
    feature=TRAINING_CHECKPOINT,
    why="verl's checkpoint has its final name while it is being written, its tracker is written in place, and the "
    "place in the data is pickled",
    upstream="not forwarded: part of this project's features",
    remove_when="a kill at any moment leaves the pinned verl a checkpoint that it can go on from",
)
def save_checkpoint(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    from verl_patches.features.training_checkpoint.feature import writes_in_background
    from verl_patches.features.training_checkpoint.trainer import save_step

    current = settings.current()
    in_background = self.config.actor_rollout_ref.actor.strategy == "megatron" and writes_in_background(current)
    save_step(self, current.checkpoint, in_background)


@wrap(
    f"{_TRAINER}._load_checkpoint",
    feature=TRAINING_CHECKPOINT,
    evidence="executed",
    relies_on=[f"{_TRAINER}.fit"],
    why="verl goes on from whatever its tracker names, complete or not, and unpickles it",
    upstream="not forwarded: part of this project's features",
    remove_when="see _save_checkpoint",
)
def load_checkpoint(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    from verl_patches.features.training_checkpoint.trainer import resume_step

    resume_step(self, settings.current().measure.output_dir)


@wrap(
    f"{_TRAINER}.fit",
    feature=ALERTS,
    why="an alert that ends the run does so between two steps, with the step saved",
    upstream="not forwarded: part of this project's features",
    remove_when="never: it is this project's own record",
    outside=["dynamic_sampling"],
)
def fit_until_an_alert(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    from verl_patches.features.alerts.watcher import alerts_of_run
    from verl_patches.features.measure.run_files import RunFiles

    current = settings.current()
    with alerts_of_run(current, RunFiles(current.measure.output_dir).alert, self):
        return upstream(self)


@wrap(
    f"{_TRAINER}.fit",
    feature=TRAINING_CHECKPOINT,
    evidence="executed",
    why="the last checkpoint may still be being written when the loop ends",
    upstream="not forwarded: part of this project's features",
    remove_when="see _save_checkpoint",
    outside=["dynamic_sampling", "alerts"],
)
def fit_to_the_last_checkpoint(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    from ray.exceptions import RayError

    from verl_patches.features.training_checkpoint.trainer import process_publisher

    with process_publisher().finishing_at_end(unreachable=RayError):
        return upstream(self)


@wrap(
    f"{_TRAINER}.fit",
    feature=MEASURE,
    evidence="executed",
    why="the time from the start to here is the start-up time that a run reports; what verl lets pass makes it fail at "
    "its end: skipped updates, metrics that are not finite, a reward function that failed",
    outside=["training_checkpoint"],
    **_OWN_RECORD,
)
def fit(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    from verl_patches.features.measure.run_end import faults_of_run

    _note("training_begins")
    with faults_of_run(settings.current(), lambda: getattr(self, "global_steps", 0)):
        return upstream(self)


@wrap(
    f"{_TRAINER}.fit",
    feature=TRACKING,
    evidence="executed",
    why="verl's trackers end with the process and know nothing of how the training ended",
    upstream="docs/upstream/verl-tracking-runs.md",
    remove_when="the pinned verl ends its trackers' runs as finished or failed",
    outside=["measure"],
)
def fit_with_trackers(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    from verl_patches.features.tracking.run import closed_at_the_end

    with closed_at_the_end():
        return upstream(self)


@wrap(
    f"{_TRAINER}.init_workers",
    feature=WATCH,
    evidence="executed",
    why="the training loop can stop as its workers can, and until it asks for them none is missing",
    upstream="not forwarded: part of this project's features",
    remove_when="never: it is this project's own watch",
    outside=["training_checkpoint"],
)
def init_workers_with_signs_of_life(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    from verl_patches.features.watch.progress import count_answers
    from verl_patches.features.watch.signs import TRAINER, start_in_ray

    for manager in (getattr(self, "reward_fn", None), getattr(self, "val_reward_fn", None)):
        count_answers(manager)
    start_in_ray(TRAINER, settings.current().watch.interval_s)
    return upstream(self)


@wrap(
    f"{_TRAINER}.fit",
    feature=WATCH,
    evidence="executed",
    why="what the loop does itself between its calls of the workers has a limit too, and its step belongs to any stop",
    upstream="not forwarded: part of this project's features",
    remove_when="never: it is this project's own watch",
    outside=["tracking"],
)
def fit_in_phase(upstream: Callable[..., None], self: RayPPOTrainer) -> None:
    from verl_patches.features.watch.signs import process_signs

    process_signs().step = lambda: getattr(self, "global_steps", None)
    with process_signs().phase("driver"):
        return upstream(self)


def _absent_log_prob(batch: DataProto) -> DataProto:
    """What compute_log_prob returns when the update takes its own log-probs: NaN in both columns that fit reads."""
    from verl import DataProto

    from verl_patches.features.onpolicy.log_probs import absent_log_probs

    absent = absent_log_probs(batch.batch["responses"])
    return DataProto.from_dict(tensors={"old_log_probs": absent, "entropys": absent.clone()})


def _end_tokens(trainer: RayPPOTrainer) -> EndTokens:
    """The tokens that end an answer, as the workers' engines have them."""
    from verl.utils.fs import copy_to_local

    from verl_patches.features.answer_ends.ends import end_tokens_of

    node = trainer.config.actor_rollout_ref
    return end_tokens_of(node.rollout, copy_to_local(node.model.path), trainer.tokenizer)


def _note(event: str) -> None:
    from verl_patches.features.measure.run_files import RunFiles

    RunFiles(settings.current().measure.output_dir).note(event)
