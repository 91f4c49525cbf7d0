"""Patches of verl's Megatron workers: they activate the overlay's settings, enter the phases of a step and report
metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from overlay import add, wrap
from overlay.declaration import Evidence
from verl_patches.features import settings
from verl_patches.features.compatibility.feature import SETTINGS
from verl_patches.features.expert_sets.feature import EXPERT_SETS
from verl_patches.features.learning_rate.feature import LEARNING_RATE
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.mindspeed.feature import MINDSPEED
from verl_patches.features.nonfinite.feature import NONFINITE
from verl_patches.features.precision.feature import PRECISION
from verl_patches.features.profile.feature import PROFILE
from verl_patches.features.reshard.feature import RESHARD
from verl_patches.features.residency.feature import PHASES
from verl_patches.features.sample_handles.feature import SAMPLE_HANDLES
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT
from verl_patches.features.watch.feature import WATCH

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig
    from verl import DataProto
    from verl.workers.megatron_workers import ActorRolloutRefWorker, CriticWorker
    from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
    from verl.workers.sharding_manager.megatron_vllm import MegatronVLLMShardingManager
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

_WORKER = "verl.workers.megatron_workers:ActorRolloutRefWorker"
_CRITIC = "verl.workers.megatron_workers:CriticWorker"
_OURS = "not forwarded: part of this project's features"
_CRITIC_ON_THE_DEVICE = "only the critic's state must be on the device"
_ON_TOKENS = "the driver sends handles, and upstream's method computes on tokens"


@wrap(
    f"{_WORKER}.__init__",
    feature=MINDSPEED,
    why="MindSpeed-LLM changes Megatron according to its arguments, which verl's configuration decides, and must do so "
    "before the parallel groups are made",
    upstream="not forwarded: needs this project's translation of verl's configuration",
    remove_when="verl starts MindSpeed-LLM with its own arguments",
)
def init_with_engine(upstream: Callable[..., None], self: ActorRolloutRefWorker, config: DictConfig, role: str) -> None:
    from verl_patches.features.mindspeed.megatron_adaptor import start_for

    start_for(config, settings.current())
    upstream(self, config, role)


@wrap(
    f"{_WORKER}.__init__",
    feature=WATCH,
    evidence="executed",
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
    evidence="executed",
    why="every process with a model needs the overlay's settings before it builds anything",
    outside=["mindspeed", "watch"],
)
def init(upstream: Callable[..., None], self: ActorRolloutRefWorker, config: DictConfig, role: str) -> None:
    from verl_patches.workers.model_check import check_workers_model

    settings.activate(settings.OverlaySettings.from_config(config))
    check_workers_model(config)
    upstream(self, config, role)


@wrap(
    f"{_WORKER}._build_model_optimizer",
    feature=PRECISION,
    why="verl fixes bfloat16 in init_model; comparing training with rollout to 1e-3 needs float32",
    upstream="https://github.com/verl-project/verl/pull/4086",
    remove_when="verl's Megatron worker reads its dtype from the configuration",
)
def build_model_optimizer(
    upstream: Callable[..., tuple[Any, ...]], self: ActorRolloutRefWorker, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    from verl_patches.features.precision.dtypes import run_dtype

    self.param_dtype = self.dtype = run_dtype(settings.current().precision)
    return upstream(self, *args, **kwargs)


@wrap(
    f"{_WORKER}._build_model_optimizer",
    feature=NONFINITE,
    evidence="executed",
    why="from weights that contain inf or nan no update is ever finite, and the run would continue to its end with "
    "all of them skipped",
    upstream=_OURS,
    remove_when="verl checks its loaded weights",
    outside=["precision"],
)
def build_model_of_finite_weights(
    upstream: Callable[..., tuple[Any, ...]], self: ActorRolloutRefWorker, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    from post_training.finite_steps.weights import check_weights

    built = upstream(self, *args, **kwargs)
    model = "actor's" if self._is_actor else "reference policy's"
    check_weights(
        built[0],
        f"before training, the {model} weights",
        f"verify the loaded files (actor_rollout_ref.model.path={self.config.model.path})",
    )
    return built


@wrap(
    f"{_WORKER}._build_rollout",
    feature=PHASES,
    evidence="executed",
    why="vLLM sizes its KV cache by the free memory, so the training state must be off the device while the "
    "engine starts",
    upstream=_OURS,
    remove_when="verl moves rollout weights and KV cache without vLLM's sleep mode",
)
def build_rollout(
    upstream: Callable[..., tuple[vLLMRollout, MegatronVLLMShardingManager]],
    self: ActorRolloutRefWorker,
    *args: Any,
    **kwargs: Any,
) -> tuple[vLLMRollout, MegatronVLLMShardingManager]:
    from verl_patches.features.residency.registration import register_actor, register_rollout
    from verl_patches.workers.process_residency import process_residency

    residency = process_residency()
    register_actor(residency, self.actor_module, self.actor_optimizer)
    residency.enter("init")
    rollout, manager = upstream(self, *args, **kwargs)
    engine = rollout.inference_engine.llm_engine
    runner = engine.model_executor.driver_worker.worker.model_runner
    register_rollout(residency, runner, _rewritten_weights(engine, runner))
    residency.enter("init")
    return rollout, manager


@wrap(
    f"{_WORKER}._build_rollout",
    feature=EXPERT_SETS,
    evidence="executed",
    why="vLLM does not report its chosen experts; hooks on the model of its runner do, from its first forward on",
    upstream=_OURS,
    remove_when="vLLM-Ascend returns its chosen experts",
)
def build_watched_rollout(
    upstream: Callable[..., tuple[vLLMRollout, MegatronVLLMShardingManager]],
    self: ActorRolloutRefWorker,
    *args: Any,
    **kwargs: Any,
) -> tuple[vLLMRollout, MegatronVLLMShardingManager]:
    from verl_patches.features.expert_sets.records import process_choices
    from verl_patches.features.expert_sets.rollout import RunnerChoices

    rollout, manager = upstream(self, *args, **kwargs)
    runner = rollout.inference_engine.llm_engine.model_executor.driver_worker.worker.model_runner
    choices = process_choices()
    choices.watched = RunnerChoices(runner, choices.rollout, EXPERT_SETS.current().share).install()
    return rollout, manager


@wrap(
    f"{_WORKER}.init_model",
    feature=PHASES,
    evidence="executed",
    why="the reference policy's weights are needed only in their own phase",
    upstream=_OURS,
    remove_when="verl offloads the reference policy without swapping its parameters' data",
)
def init_model_resident(upstream: Callable[..., None], self: ActorRolloutRefWorker) -> None:
    upstream(self)
    if not self._is_ref:
        return
    from verl_patches.features.residency.registration import register_reference
    from verl_patches.workers.process_residency import process_residency

    residency = process_residency()
    register_reference(residency, self.ref_module)
    residency.enter("init")


@wrap(
    f"{_WORKER}.init_model",
    feature=MEASURE,
    evidence="executed",
    why="a worker may start only with all patches in use, and a run must be able to report them",
)
def init_model_reported(upstream: Callable[..., None], self: ActorRolloutRefWorker) -> None:
    from verl_patches.workers.worker_report import report_start

    upstream(self)
    report_start(self, MEASURE.current())


@wrap(
    f"{_WORKER}.generate_sequences",
    feature=SAMPLE_HANDLES,
    evidence="executed",
    why="the tokens are needed where they were generated, or on a device beside it",
    upstream=_OURS,
    remove_when="see RayPPOTrainer.init_workers",
)
def generate_and_keep(upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, prompts: DataProto) -> DataProto:
    import torch

    from verl_patches.features.sample_handles.store import process_store

    with process_store().forgetting_after_a_failure():
        answers = upstream(self, prompts)
        # verl's own pad_token_id is the generation configuration's, which published models often leave out.
        asked = {**prompts.meta_info, "pad_token_id": self.tokenizer.pad_token_id}
        return process_store().keep(answers, asked, torch.device("cuda", torch.cuda.current_device()))


@wrap(
    f"{_WORKER}.compute_log_prob",
    feature=SAMPLE_HANDLES,
    why=_ON_TOKENS,
    upstream=_OURS,
    remove_when="see RayPPOTrainer.init_workers",
)
def log_probs_of_handles(upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, data: DataProto) -> DataProto:
    from verl_patches.features.sample_handles.store import process_store

    return process_store().log_probs(partial(upstream, self), data, _data_parallel_rank())


@wrap(
    f"{_WORKER}.compute_ref_log_prob",
    feature=SAMPLE_HANDLES,
    evidence="executed",
    why=_ON_TOKENS,
    upstream=_OURS,
    remove_when="see RayPPOTrainer.init_workers",
)
def ref_log_probs_of_handles(
    upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, data: DataProto
) -> DataProto:
    from verl_patches.features.sample_handles.store import process_store

    return process_store().log_probs(partial(upstream, self), data, _data_parallel_rank())


@wrap(
    f"{_WORKER}.update_actor",
    feature=SAMPLE_HANDLES,
    evidence="executed",
    why=_ON_TOKENS,
    upstream=_OURS,
    remove_when="see RayPPOTrainer.init_workers",
)
def update_on_handles(upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, data: DataProto) -> DataProto:
    from verl_patches.features.sample_handles.store import process_store

    return process_store().update(partial(upstream, self), data, _data_parallel_rank())


def _data_parallel_rank() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_data_parallel_rank())


@wrap(
    f"{_WORKER}.compute_log_prob",
    feature=PHASES,
    why="only the actor's weights must be on the device",
    upstream=_OURS,
    remove_when="see _build_rollout",
    outside=["sample_handles"],
)
def compute_log_prob(upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, data: DataProto) -> DataProto:
    _enter("old_log_prob")
    return upstream(self, data)


@wrap(
    f"{_WORKER}.compute_ref_log_prob",
    feature=PHASES,
    evidence="executed",
    why="only the reference policy's weights must be on the device",
    upstream=_OURS,
    remove_when="see _build_rollout",
    outside=["sample_handles"],
)
def compute_ref_log_prob(upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, data: DataProto) -> DataProto:
    _enter("ref")
    return upstream(self, data)


@wrap(
    f"{_WORKER}.update_actor",
    feature=PHASES,
    evidence="executed",
    why="the training state must be on the device, and the rollout off it",
    upstream=_OURS,
    remove_when="see _build_rollout",
    outside=["sample_handles"],
)
def update_actor_resident(
    upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, data: DataProto
) -> DataProto:
    _enter("update")
    return upstream(self, data)


@wrap(
    f"{_WORKER}.update_actor",
    feature=MEASURE,
    evidence="executed",
    why="verl reads metrics from the last stage of the first replica only; time and memory are of the slowest die",
    outside=["phases"],
)
def update_actor_measured(
    upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, data: DataProto
) -> DataProto:
    from verl_patches.workers.process_residency import process_residency
    from verl_patches.workers.worker_report import finish_update

    output = upstream(self, data)
    process_residency().close()
    finish_update(output.meta_info["metrics"], self.rank, MEASURE.current())
    return output


@wrap(
    f"{_WORKER}.update_actor",
    feature=LEARNING_RATE,
    evidence="executed",
    why="verl's Megatron worker has no learning rate scheduler: every step has the same rate, whatever is configured",
    upstream="https://github.com/verl-project/verl/pull/1701",
    remove_when="the pinned verl's Megatron worker has a schedule that a resume continues",
    outside=["phases", "measure"],
)
def update_actor_at_its_rate(
    upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, data: DataProto
) -> DataProto:
    from verl_patches.features.learning_rate.rates import report_rate, set_rate

    set_rate(self.actor_optimizer, self.config.actor.optim, data.meta_info)
    output = upstream(self, data)
    report_rate(self.actor_optimizer, output.meta_info["metrics"])
    return output


@wrap(
    f"{_WORKER}.save_checkpoint",
    feature=PHASES,
    why="weights and optimizer state are read",
    upstream=_OURS,
    remove_when="see _build_rollout",
)
def save_checkpoint(upstream: Callable[..., None], self: ActorRolloutRefWorker, *args: Any, **kwargs: Any) -> None:
    _enter("checkpoint")
    return upstream(self, *args, **kwargs)


@wrap(
    f"{_WORKER}.load_checkpoint",
    feature=PHASES,
    why="weights and optimizer state are written",
    upstream=_OURS,
    remove_when="see _build_rollout",
)
def load_checkpoint(upstream: Callable[..., None], self: ActorRolloutRefWorker, *args: Any, **kwargs: Any) -> None:
    _enter("checkpoint")
    return upstream(self, *args, **kwargs)


@add(
    f"{_WORKER}.finish_checkpoint",
    feature=TRAINING_CHECKPOINT,
    evidence="executed",
    why="verl's driver has no call that waits for a worker's checkpoint",
    upstream=_OURS,
    remove_when="a worker of the pinned verl saves in the background, and reports when it has",
)
def finish_checkpoint(module: ModuleType) -> Callable[..., None]:
    from verl.single_controller.base.decorator import Dispatch, register

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self: ActorRolloutRefWorker) -> None:
        from post_training.hang_detection.signs import process_signs
        from verl_patches.features.measure.step_record import current_record
        from verl_patches.features.training_checkpoint.background import process_writer

        if process_writer().is_writing:
            with current_record().timed("checkpoint_wait"), process_signs().phase("checkpoint"):
                process_writer().finish()

    return finish_checkpoint


@add(
    f"{_WORKER}.profile_step",
    feature=PROFILE,
    evidence="executed",
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
    why="verl fixes bfloat16 in init_model; the values of a float32 run are float32 too",
    upstream="https://github.com/verl-project/verl/pull/4086",
    remove_when="verl's Megatron worker reads its dtype from the configuration",
)
def build_critic_model_optimizer(
    upstream: Callable[..., tuple[Any, ...]], self: CriticWorker, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    from verl_patches.features.precision.dtypes import run_dtype

    self.param_dtype = self.dtype = run_dtype(settings.current().precision)
    return upstream(self, *args, **kwargs)


@wrap(
    f"{_CRITIC}._build_critic_model_optimizer",
    feature=NONFINITE,
    why="from weights that contain inf or nan no update is ever finite",
    upstream=_OURS,
    remove_when="verl checks its loaded weights",
    outside=["precision"],
)
def build_critic_of_finite_weights(
    upstream: Callable[..., tuple[Any, ...]], self: CriticWorker, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    from post_training.finite_steps.weights import check_weights

    built = upstream(self, *args, **kwargs)
    remedy = f"verify the loaded files (critic.model.path={self.config.model.path})"
    check_weights(built[0], "before training, the critic's weights", remedy)
    return built


@wrap(
    f"{_CRITIC}.init_model",
    feature=PHASES,
    why="the critic is needed in its own phases, and needs the rollout's memory",
    upstream=_OURS,
    remove_when="see _build_rollout",
)
def init_critic_resident(upstream: Callable[..., None], self: CriticWorker) -> None:
    from verl_patches.features.residency.registration import register_critic
    from verl_patches.workers.process_residency import process_residency

    upstream(self)
    residency = process_residency()
    register_critic(residency, self.critic_module, self.critic_optimizer)
    residency.enter("init")


@wrap(
    f"{_CRITIC}.update_critic",
    feature=LEARNING_RATE,
    why="verl's Megatron worker has no learning rate scheduler: every step has the same rate, whatever is configured",
    upstream="https://github.com/verl-project/verl/pull/1701",
    remove_when="the pinned verl's Megatron worker has a schedule that a resume continues",
    outside=["phases", "measure"],
)
def update_critic_at_its_rate(upstream: Callable[..., DataProto], self: CriticWorker, data: DataProto) -> DataProto:
    from verl_patches.features.learning_rate.rates import report_rate, set_rate

    set_rate(self.critic_optimizer, self.config.optim, data.meta_info)
    output = upstream(self, data)
    report_rate(self.critic_optimizer, output.meta_info["metrics"], "critic")
    return output


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


@wrap(
    f"{_CRITIC}.compute_values",
    feature=PHASES,
    why=_CRITIC_ON_THE_DEVICE,
    upstream=_OURS,
    remove_when="see _build_rollout",
)
def compute_values(upstream: Callable[..., DataProto], self: CriticWorker, data: DataProto) -> DataProto:
    _enter("values")
    return upstream(self, data)


@wrap(
    f"{_CRITIC}.update_critic",
    feature=PHASES,
    why=_CRITIC_ON_THE_DEVICE,
    upstream=_OURS,
    remove_when="see _build_rollout",
)
def update_critic_in_its_phase(upstream: Callable[..., DataProto], self: CriticWorker, data: DataProto) -> DataProto:
    _enter("update_critic")
    return upstream(self, data)


@wrap(
    f"{_CRITIC}.save_checkpoint",
    feature=PHASES,
    why=_CRITIC_ON_THE_DEVICE,
    upstream=_OURS,
    remove_when="see _build_rollout",
)
def save_critic_in_its_phase(upstream: Callable[..., Any], self: CriticWorker, *args: Any, **kwargs: Any) -> Any:
    _enter("critic_checkpoint")
    return upstream(self, *args, **kwargs)


@wrap(
    f"{_CRITIC}.load_checkpoint",
    feature=PHASES,
    why=_CRITIC_ON_THE_DEVICE,
    upstream=_OURS,
    remove_when="see _build_rollout",
)
def load_critic_in_its_phase(upstream: Callable[..., Any], self: CriticWorker, *args: Any, **kwargs: Any) -> Any:
    _enter("critic_checkpoint")
    return upstream(self, *args, **kwargs)


def _watch(target: str, phase: str, *, inside: Sequence[str] = (), evidence: Evidence = "checked") -> None:
    """Declare the patch that runs a worker's method as this phase of the hang detector.

    Args:
        target: the method.
        phase: the phase's name.
        inside: features whose patches of the method are called within the phase.
        evidence: of the patch.
    """

    @wrap(
        target,
        feature=WATCH,
        evidence=evidence,
        why="how a hung worker is handled, and how long it may take",
        outside=inside,
    )
    def method(
        upstream: Callable[..., Any], self: ActorRolloutRefWorker | CriticWorker, *args: Any, **kwargs: Any
    ) -> Any:
        from post_training.hang_detection.signs import process_signs

        with process_signs().phase(phase):
            return upstream(self, *args, **kwargs)


_watch(f"{_WORKER}.init_model", "init", inside=["phases", "measure"], evidence="executed")
_watch(f"{_WORKER}.generate_sequences", "rollout", inside=["sample_handles"], evidence="executed")
_watch(f"{_WORKER}.compute_log_prob", "old_log_prob", inside=["phases", "sample_handles"])
_watch(f"{_WORKER}.compute_ref_log_prob", "ref", inside=["phases", "sample_handles"], evidence="executed")
_watch(
    f"{_WORKER}.update_actor",
    "update",
    inside=["phases", "measure", "learning_rate", "sample_handles"],
    evidence="executed",
)
_watch(f"{_WORKER}.save_checkpoint", "checkpoint", inside=["phases"])
_watch(f"{_WORKER}.load_checkpoint", "checkpoint", inside=["phases"])
_watch(f"{_CRITIC}.init_model", "init", inside=["phases"])
_watch(f"{_CRITIC}.compute_values", "values", inside=["phases"])
_watch(f"{_CRITIC}.update_critic", "update_critic", inside=["phases", "measure", "learning_rate"])
_watch(f"{_CRITIC}.save_checkpoint", "checkpoint", inside=["phases"])
_watch(f"{_CRITIC}.load_checkpoint", "checkpoint", inside=["phases"])


def _enter(phase: str) -> None:
    from verl_patches.features.measure.step_record import current_record
    from verl_patches.workers.process_residency import process_residency

    current_record().began(phase)
    process_residency().enter(phase)


def _rewritten_weights(engine: LLMEngine, runner: NPUModelRunner) -> list[torch.Tensor]:
    """Return the rollout weights that every reshard writes; none if verl moves them, which does not tell."""
    if not RESHARD.is_active():
        return []
    import torch.distributed as dist

    from post_training.layouts.model_tensors import rollout_tensors, wholly_covered
    from post_training.layouts.placements import rollout_placement
    from post_training.models.families import table_for

    table = table_for(engine.vllm_config.model_config.hf_config)
    shards = table.vllm_ascend(rollout_placement(engine.vllm_config), dist.get_rank())
    return wholly_covered(rollout_tensors(runner.get_model()), shards)
