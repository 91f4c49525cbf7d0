"""verl's sharding manager between Megatron and vLLM: reshard, then generate, each with only its own tensors."""

from typing import Any

from overlay import wrap
from verl_patches.features.reshard.feature import RESHARD
from verl_patches.features.residency.feature import RESIDENCY
from verl_patches.features.watch.feature import WATCH

_MANAGER = "verl.workers.sharding_manager.megatron_vllm:MegatronVLLMShardingManager"


@wrap(
    f"{_MANAGER}.__enter__",
    feature=RESHARD,
    evidence="executed",
    why="verl gathers every tensor whole on every rank; a plan of byte ranges moves only what a rank serves. Weights "
    "that MLA derives from others go stale with either way",
    upstream="not forwarded: part of this project's features",
    remove_when="verl reshards Megatron experts by point-to-point transfer and refreshes derived weights",
)
def enter(upstream, self):
    from verl_patches.features import settings
    from verl_patches.features.measure.step_record import current_record
    from verl_patches.features.reshard.generation import process_generation
    from verl_patches.features.reshard.mla_refresh import refresh_absorbed_weights
    from verl_patches.workers.process_residency import process_residency

    residency = process_residency()
    residency.enter("reshard")
    with process_generation().writing(), current_record().timed("reshard"):
        if settings.current().reshard.enabled:
            _run_plan(self)
        else:
            upstream(self)
        refresh_absorbed_weights(_rollout_model(self))
    if settings.current().measure.verify_weights:
        current_record().count("reshard/weights_differing", len(_resharder(self).verify()))
    residency.enter("rollout")


@wrap(
    f"{_MANAGER}.__exit__",
    feature=RESIDENCY,
    evidence="executed",
    why="KV cache and rollout weights leave before anything of training comes back",
    upstream="not forwarded: part of this project's features",
    remove_when="verl moves rollout weights and KV cache without vLLM's sleep mode",
)
def leave(upstream, self, exc_type, exc_value, traceback):
    from verl_patches.workers.process_residency import process_residency

    # Upstream resets the prefix cache here, through vLLM's sleep, whether or not that sleeps.
    upstream(self, exc_type, exc_value, traceback)
    process_residency().enter("idle")


@wrap(
    f"{_MANAGER}.__enter__",
    feature=WATCH,
    evidence="executed",
    why="resharding lies inside verl's call for a generation, and has a limit of its own",
    upstream="not forwarded: part of this project's features",
    remove_when="never: it is this project's own watch",
    after=[f"{_MANAGER}.__enter__@reshard"],
)
def enter_in_phase(upstream, self):
    from verl_patches.features import settings
    from verl_patches.features.watch.signs import in_phase

    return in_phase(settings.current().watch, "reshard", upstream, self)


def _run_plan(manager: Any) -> None:
    from verl_patches.features.measure.step_record import current_record

    report, record = _resharder(manager).run(), current_record()
    record.count("collectives/all_to_all/count", report.collectives)
    record.count("collectives/all_to_all/bytes", report.bytes_sent)
    record.count("reshard/bytes_received", report.bytes_received)
    record.count("reshard/expert_bytes_received", report.expert_bytes_received)


def _resharder(manager):
    """The manager's resharder; it is made at first use, when both models exist."""
    if not hasattr(manager, "overlay_resharder"):
        import torch.distributed as dist

        from post_training.layouts.placements import rollout_placement, train_placement
        from verl_patches.features import settings
        from verl_patches.features.reshard.resharder import resharder_for

        chosen = settings.current().reshard
        manager.overlay_resharder = resharder_for(
            manager.model_config,
            manager.actor_module,
            _rollout_model(manager),
            train_placement(manager.transformer_config),
            rollout_placement(manager.inference_engine.llm_engine.vllm_config),
            dist.group.WORLD,
            chosen.bucket_bytes,
            chosen.overlap,
            chosen.dies_per_node or None,
        )
    return manager.overlay_resharder


def _rollout_model(manager):
    return manager.inference_engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
