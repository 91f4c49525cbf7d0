"""Patches of verl's FSDP workers: they activate the overlay's settings, enter a step's phases and report metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from overlay import add, wrap
from verl_patches.features import settings
from verl_patches.features.compatibility.feature import SETTINGS
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.precision.feature import PRECISION
from verl_patches.features.profile.feature import PROFILE
from verl_patches.features.residency.feature import PHASES
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT
from verl_patches.features.watch.feature import WATCH

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl import DataProto
    from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker

_WORKER = "verl.workers.fsdp_workers:ActorRolloutRefWorker"
_CRITIC = "verl.workers.fsdp_workers:CriticWorker"
_OURS = "not forwarded: part of this project's features"


@wrap(
    f"{_WORKER}.__init__",
    feature=WATCH,
    why="a hung worker is detected by its missing heartbeats, as soon as its groups exist",
)
def init_with_signs_of_life(
    upstream: Callable[..., None], self: ActorRolloutRefWorker, config: DictConfig, role: str
) -> None:
    from post_training.hang_detection.progress import start_worker
    from post_training.hang_detection.signs import process_signs

    start_worker(WATCH.current().interval_s)
    with process_signs().phase("init"):
        return upstream(self, config, role)


@wrap(
    f"{_WORKER}.__init__",
    feature=SETTINGS,
    why="every process with a model needs the overlay's settings before it builds anything",
    outside=["watch"],
)
def init(upstream: Callable[..., None], self: ActorRolloutRefWorker, config: DictConfig, role: str) -> None:
    from verl_patches.workers.model_check import check_workers_model

    settings.activate(settings.OverlaySettings.from_config(config))
    check_workers_model(config)
    upstream(self, config, role)


@wrap(
    f"{_WORKER}._build_model_optimizer",
    feature=PRECISION,
    why="one key makes training and rollout float32; verl has one for each of four types, and none for the rollout's",
    upstream="not forwarded: verl can be told all of them",
    remove_when="verl compares training with rollout in float32 by one key",
)
def build_model_optimizer(
    upstream: Callable[..., tuple[Any, ...]], self: ActorRolloutRefWorker, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    from verl_patches.features.precision.dtypes import sharded_in_float32

    return upstream(self, *args, **{**kwargs, "fsdp_config": sharded_in_float32(kwargs["fsdp_config"])})


@wrap(
    f"{_WORKER}.init_model",
    feature=MEASURE,
    why="a worker may start only with all patches in use, and a run must be able to report them",
)
def init_model_reported(upstream: Callable[..., None], self: ActorRolloutRefWorker) -> None:
    from verl_patches.workers.worker_report import report_start

    upstream(self)
    report_start(self, MEASURE.current())


@wrap(
    f"{_WORKER}.init_model",
    feature=TRAINING_CHECKPOINT,
    why="the rollout draws from its own random numbers in the sharding manager, which the checkpoint manager cannot "
    "reach",
    upstream=_OURS,
    remove_when="the pinned verl's FSDP workers save the rollout's random numbers",
    inside=["measure"],
)
def init_model_that_saves_its_random_numbers(upstream: Callable[..., None], self: ActorRolloutRefWorker) -> None:
    upstream(self)
    if self._is_actor:
        self.checkpoint_manager.rollout_sharding_manager = self.rollout_sharding_manager


@wrap(
    f"{_WORKER}.compute_log_prob",
    feature=PHASES,
    why="device memory is measured by phase",
)
def compute_log_prob(upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, data: DataProto) -> DataProto:
    _enter("old_log_prob")
    return upstream(self, data)


@wrap(
    f"{_WORKER}.compute_ref_log_prob",
    feature=PHASES,
    why="device memory is measured by phase",
)
def compute_ref_log_prob(upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, data: DataProto) -> DataProto:
    _enter("ref")
    return upstream(self, data)


@wrap(
    f"{_WORKER}.update_actor",
    feature=PHASES,
    why="device memory is measured by phase",
)
def update_actor(upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, data: DataProto) -> DataProto:
    _enter("update")
    return upstream(self, data)


@wrap(
    f"{_WORKER}.update_actor",
    feature=MEASURE,
    why="verl reports the first rank's metrics; time and memory are of the slowest die, and log-probs of all tokens",
    outside=["phases"],
)
def update_actor_measured(
    upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, data: DataProto
) -> DataProto:
    from verl_patches.workers.process_residency import process_residency
    from verl_patches.workers.worker_report import compare_log_probs, finish_update

    compare_log_probs(data.batch)
    output = upstream(self, data)
    process_residency().close()
    finish_update(output.meta_info["metrics"], self.rank, MEASURE.current())
    return output


@add(
    f"{_WORKER}.profile_step",
    feature=PROFILE,
    why="verl's own profiler records only CUDA, the actor's update, and one range of steps",
    upstream="https://github.com/verl-project/verl/pull/2194",
    remove_when="see RayPPOTrainer.init_workers",
)
def profile_step(module: ModuleType) -> Callable[..., None]:
    from verl_patches.features.profile.recorder import method_of_worker

    return method_of_worker()


@wrap(
    f"{_CRITIC}._build_critic_model_optimizer",
    feature=PRECISION,
    why="one key makes training and rollout float32; verl has one for each of four types, and none for the rollout's",
    upstream="not forwarded: verl can be told all of them",
    remove_when="verl compares training with rollout in float32 by one key",
)
def build_critic_model_optimizer(
    upstream: Callable[..., tuple[Any, ...]], self: CriticWorker, config: DictConfig
) -> tuple[Any, ...]:
    from verl_patches.features.precision.dtypes import sharded_in_float32

    self.config.model.fsdp_config = sharded_in_float32(self.config.model.fsdp_config)
    return upstream(self, config)


@wrap(f"{_CRITIC}.compute_values", feature=PHASES, why="device memory is measured by phase")
def compute_values(upstream: Callable[..., DataProto], self: CriticWorker, data: DataProto) -> DataProto:
    _enter("values")
    return upstream(self, data)


@wrap(f"{_CRITIC}.update_critic", feature=PHASES, why="device memory is measured by phase")
def update_critic(upstream: Callable[..., DataProto], self: CriticWorker, data: DataProto) -> DataProto:
    _enter("update_critic")
    return upstream(self, data)


@wrap(
    f"{_CRITIC}.update_critic",
    feature=MEASURE,
    why="during the critic's warm-up its update is the last of a step, and the measurement ends there",
    outside=["phases"],
)
def update_critic_measured(upstream: Callable[..., DataProto], self: CriticWorker, data: DataProto) -> DataProto:
    from verl_patches.workers.worker_report import finish_warmup

    output = upstream(self, data)
    finish_warmup(data, output.meta_info["metrics"], self.rank, MEASURE.current())
    return output


def _watch(target: str, phase: str, *, inside: Sequence[str] = ()) -> None:
    """Declare the patch that runs a worker's method as this phase of the hang detector.

    Args:
        target: the method.
        phase: the phase's name.
        inside: features whose patches of the method are called within the phase.
    """

    @wrap(
        target,
        feature=WATCH,
        why="how a hung worker is handled, and how long it may take",
        outside=inside,
    )
    def method(
        upstream: Callable[..., Any], self: ActorRolloutRefWorker | CriticWorker, *args: Any, **kwargs: Any
    ) -> Any:
        from post_training.hang_detection.signs import process_signs

        with process_signs().phase(phase):
            return upstream(self, *args, **kwargs)


_watch(f"{_WORKER}.init_model", "init", inside=["measure", "training_checkpoint"])
_watch(f"{_WORKER}.generate_sequences", "rollout")
_watch(f"{_WORKER}.compute_log_prob", "old_log_prob", inside=["phases"])
_watch(f"{_WORKER}.compute_ref_log_prob", "ref", inside=["phases"])
_watch(f"{_WORKER}.update_actor", "update", inside=["phases", "measure"])
_watch(f"{_WORKER}.save_checkpoint", "checkpoint")
_watch(f"{_WORKER}.load_checkpoint", "checkpoint")
_watch(f"{_CRITIC}.init_model", "init")
_watch(f"{_CRITIC}.compute_values", "values", inside=["phases"])
_watch(f"{_CRITIC}.update_critic", "update_critic", inside=["phases", "measure"])
_watch(f"{_CRITIC}.save_checkpoint", "checkpoint")
_watch(f"{_CRITIC}.load_checkpoint", "checkpoint")


def _enter(phase: str) -> None:
    from verl_patches.features.measure.step_record import current_record
    from verl_patches.workers.process_residency import process_residency

    current_record().began(phase)
    process_residency().enter(phase)
