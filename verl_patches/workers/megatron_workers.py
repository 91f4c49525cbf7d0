"""verl's Megatron worker enters the phases of a step and reports what it measured."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from overlay import add, wrap
from verl_patches.features import settings
from verl_patches.features.compatibility.feature import SETTINGS
from verl_patches.features.learning_rate.feature import LEARNING_RATE
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.mindspeed.feature import MINDSPEED
from verl_patches.features.nonfinite.feature import NONFINITE
from verl_patches.features.precision.feature import PRECISION
from verl_patches.features.reshard.feature import RESHARD
from verl_patches.features.residency.feature import PHASES
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT
from verl_patches.features.watch.feature import WATCH
from verl_patches.features.watch.signs import PHASE_OF_METHOD

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig
    from verl import DataProto
    from verl.workers.megatron_workers import ActorRolloutRefWorker
    from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
    from verl.workers.sharding_manager.megatron_vllm import MegatronVLLMShardingManager
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

_WORKER = "verl.workers.megatron_workers:ActorRolloutRefWorker"
_OURS = "not forwarded: part of this project's features"
# The features whose patches of a method are called inside the watch's.
_INSIDE = {
    "init_model": ["phases", "measure"],
    "update_actor": ["phases", "measure", "learning_rate"],
    "compute_log_prob": ["phases"],
    "compute_ref_log_prob": ["phases"],
    "save_checkpoint": ["phases"],
    "load_checkpoint": ["phases"],
}


@wrap(
    f"{_WORKER}.__init__",
    feature=MINDSPEED,
    why="MindSpeed-LLM changes Megatron according to its arguments, which verl's configuration decides, and must do so "
    "before the parallel groups are made",
    upstream="not forwarded: needs this project's translation of verl's configuration",
    remove_when="verl starts MindSpeed-LLM with arguments of its own",
)
def init_with_engine(upstream: Callable[..., None], self: ActorRolloutRefWorker, config: DictConfig, role: str) -> None:
    from verl_patches.features.mindspeed.megatron_adaptor import start_for

    start_for(config, settings.current())
    upstream(self, config, role)


@wrap(
    f"{_WORKER}.__init__",
    feature=WATCH,
    evidence="executed",
    why="a worker that stops answering is noticed by the signs of life that it no longer gives; from its groups on",
    upstream=_OURS,
    remove_when="never: it is this project's own watch",
)
def init_with_signs_of_life(
    upstream: Callable[..., None], self: ActorRolloutRefWorker, config: DictConfig, role: str
) -> None:
    from verl_patches.features.watch.signs import process_signs, start_worker

    start_worker(settings.current().watch.interval_s)
    with process_signs().phase("init"):
        return upstream(self, config, role)


@wrap(
    f"{_WORKER}.__init__",
    feature=SETTINGS,
    evidence="executed",
    why="every process that holds a model needs the overlay's settings before it builds anything",
    upstream=_OURS,
    remove_when="never: it is how this project is configured",
    outside=["mindspeed", "watch"],
)
def init(upstream: Callable[..., None], self: ActorRolloutRefWorker, config: DictConfig, role: str) -> None:
    settings.activate(settings.OverlaySettings.from_config(config))
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
    why="from weights that hold inf or nan no update is ever finite, and the run would go on to its end with all of "
    "them skipped",
    upstream=_OURS,
    remove_when="verl looks at the weights that it has loaded",
    outside=["precision"],
)
def build_model_of_finite_weights(
    upstream: Callable[..., tuple[Any, ...]], self: ActorRolloutRefWorker, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    from verl_patches.features.nonfinite.weights import check_weights

    built = upstream(self, *args, **kwargs)
    model = "actor's" if self._is_actor else "reference policy's"
    check_weights(
        built[0],
        f"before training, the {model} weights",
        f"verify what they were loaded from (actor_rollout_ref.model.path={self.config.model.path})",
    )
    return built


@wrap(
    f"{_WORKER}._build_rollout",
    feature=PHASES,
    evidence="executed",
    why="vLLM sizes its KV cache by the free memory, so the training state must be away while the engine starts",
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
    f"{_WORKER}.init_model",
    feature=PHASES,
    evidence="executed",
    why="the reference policy's weights are needed in its own phase only",
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
    why="a worker starts only with all patches in use, and a run must be able to show which they are",
    upstream=_OURS,
    remove_when="never: it is this project's own record",
)
def init_model_reported(upstream: Callable[..., None], self: ActorRolloutRefWorker) -> None:
    from verl_patches.workers.worker_report import report_start

    upstream(self)
    report_start(self, settings.current().measure)


@wrap(
    f"{_WORKER}.compute_log_prob",
    feature=PHASES,
    why="the actor's weights must be on the device, and nothing else need be",
    upstream=_OURS,
    remove_when="see _build_rollout",
)
def compute_log_prob(upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, data: DataProto) -> DataProto:
    _enter("old_log_prob")
    return upstream(self, data)


@wrap(
    f"{_WORKER}.compute_ref_log_prob",
    feature=PHASES,
    evidence="executed",
    why="the reference policy's weights must be on the device, and nothing else need be",
    upstream=_OURS,
    remove_when="see _build_rollout",
)
def compute_ref_log_prob(upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, data: DataProto) -> DataProto:
    _enter("ref")
    return upstream(self, data)


@wrap(
    f"{_WORKER}.update_actor",
    feature=PHASES,
    evidence="executed",
    why="the training state must be on the device, and the rollout away from it",
    upstream=_OURS,
    remove_when="see _build_rollout",
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
    upstream=_OURS,
    remove_when="never: it is this project's own record",
    outside=["phases"],
)
def update_actor_measured(
    upstream: Callable[..., DataProto], self: ActorRolloutRefWorker, data: DataProto
) -> DataProto:
    from verl_patches.workers.process_residency import process_residency
    from verl_patches.workers.worker_report import finish_update

    output = upstream(self, data)
    process_residency().close()
    finish_update(output.meta_info["metrics"], self.rank, settings.current().measure)
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
    why="verl's driver has no call that waits for a checkpoint that a worker is writing",
    upstream=_OURS,
    remove_when="a worker of the pinned verl saves in the background, and says when it has",
)
def finish_checkpoint(module: ModuleType) -> Callable[..., None]:
    from verl.single_controller.base.decorator import Dispatch, register

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self: ActorRolloutRefWorker) -> None:
        from verl_patches.features.measure.step_record import current_record
        from verl_patches.features.training_checkpoint.background import process_writer
        from verl_patches.features.watch.signs import process_signs

        if process_writer().is_writing:
            with current_record().timed("checkpoint_wait"), process_signs().phase("checkpoint"):
                process_writer().finish()

    return finish_checkpoint


def _in_phase(phase: str) -> Callable[..., Any]:
    """The body of a patch of a worker's method that is this phase."""

    def method(upstream: Callable[..., Any], self: ActorRolloutRefWorker, *args: Any, **kwargs: Any) -> Any:
        from verl_patches.features.watch.signs import process_signs

        with process_signs().phase(phase):
            return upstream(self, *args, **kwargs)

    return method


# Where one method has a patch of ours already, the phase is around that too.
for _method, _phase in PHASE_OF_METHOD.items():
    wrap(
        f"{_WORKER}.{_method}",
        feature=WATCH,
        evidence="executed" if _phase in ("init", "rollout", "ref", "update") else "checked",
        why="what a worker does when it stops answering, and how long it may take",
        upstream=_OURS,
        remove_when="never: it is this project's own watch",
        outside=_INSIDE.get(_method, ()),
    )(_in_phase(_phase))


def _enter(phase: str) -> None:
    from verl_patches.workers.process_residency import process_residency

    process_residency().enter(phase)


def _rewritten_weights(engine: LLMEngine, runner: NPUModelRunner) -> list[torch.Tensor]:
    """The rollout weights that every reshard writes; none when verl moves them, which says nothing about it."""
    if not RESHARD.is_in_force():
        return []
    import torch.distributed as dist

    from post_training.layouts.model_tensors import rollout_tensors, wholly_covered
    from post_training.layouts.placements import rollout_placement
    from post_training.models.families import table_for

    table = table_for(engine.vllm_config.model_config.hf_config)
    pieces = table.vllm_ascend(rollout_placement(engine.vllm_config), dist.get_rank())
    return wholly_covered(rollout_tensors(runner.get_model()), pieces)
