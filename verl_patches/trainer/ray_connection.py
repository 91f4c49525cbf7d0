"""Starts or joins the Ray of a run; every worker loads the overlay before anything else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_patches.trainer.isolated_ray import IsolatedRay

REPOSITORY = Path(__file__).resolve().parents[2]
# Enough for a worker on every node to start and look for a file.
_STORAGE_LIMIT_S = 600


class WorkerSource(Protocol):
    """Provider of the Python processes of Ray's workers, in place of the interpreter."""

    @property
    def py_executable(self) -> str:
        """The value of Ray's `py_executable` runtime environment."""

    def close(self) -> None:
        """Release the provider; called once Ray has shut down."""


StartWorkers = Callable[["DictConfig"], WorkerSource | None]


def no_source(config: DictConfig) -> None:
    """Return None: Ray starts its workers with the interpreter."""


@contextmanager
def connected_ray(config: DictConfig, start_workers: StartWorkers) -> Iterator[IsolatedRay | None]:
    """Connect to a Ray with the overlay in every worker.

    Yields:
        The isolated local Ray, which ends with the context; None for a Ray that was already running.
    """
    from verl_patches.trainer.isolated_ray import isolated_ray

    if config.ray_init.address != "local":
        with _connection(config, None, start_workers):
            yield None
    else:
        with isolated_ray(config.ray_init.get("temp_dir")) as own, _connection(config, own, start_workers):
            yield own


@contextmanager
def _connection(config: DictConfig, own: IsolatedRay | None, start_workers: StartWorkers) -> Iterator[None]:
    """Connect this process to its Ray, whose workers come from `start_workers` if that returns a source."""
    import ray

    from verl_patches.trainer.configuration_checks import check_cluster_resources

    workers = start_workers(config)
    try:
        environment = _runtime_environment(config, workers, own)
        if own is None:
            ray.init(address=config.ray_init.address, runtime_env=environment)
        else:
            memory = config.ray_init.get("object_store_memory")
            own.start(num_cpus=_slots(config), object_store_memory=memory, runtime_env=environment)
        check_cluster_resources(config, ray.cluster_resources())
        _check_storage(config)
        _note(config, "ray_ready")
        warm_up = ray.remote(num_cpus=0)(lambda: None).remote()
        yield
        del warm_up
    finally:
        ray.shutdown()
        if workers is not None:
            workers.close()


def _check_storage(config: DictConfig) -> None:
    """Check that all nodes of the connected Ray see the checkpoint folder, if there are several and the run uses it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from verl_patches.features.training_checkpoint.storage import check_shared, read_nonce, uses_checkpoints

    nodes = {each["NodeManagerAddress"]: each["NodeID"] for each in ray.nodes() if each["Alive"]}
    if len(nodes) < 2 or not uses_checkpoints(config.trainer):
        return

    def read_everywhere(path: str) -> dict[str, str]:
        read = ray.remote(num_cpus=0)(read_nonce)
        there = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes.values()]
        asked = [read.options(scheduling_strategy=each).remote(path) for each in there]
        return dict(zip(nodes, ray.get(asked, timeout=_STORAGE_LIMIT_S), strict=True))

    check_shared(Path(config.trainer.default_local_dir), read_everywhere)


def _runtime_environment(config: DictConfig, workers: WorkerSource | None, own: IsolatedRay | None) -> dict[str, Any]:
    """Return Ray's runtime environment for every worker of the run."""
    from verl_patches.trainer.isolated_ray import python_of_workers

    hook = prepare_worker if own is None else prepare_worker_of_own_ray
    folder = config.actor_rollout_ref.overlay.measure.output_dir
    python_path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": python_path, "TOKENIZERS_PARALLELISM": "true", "VLLM_LOGGING_LEVEL": "WARN"}
    if folder:
        variables["TENSORBOARD_DIR"] = os.path.join(folder, "tensorboard")
    environment: dict[str, Any] = {
        "env_vars": variables,
        "worker_process_setup_hook": f"{__name__}.{hook.__name__}",
        **python_of_workers(),
    }
    if workers is not None:
        environment["py_executable"] = workers.py_executable
    return environment


def _slots(config: DictConfig) -> int:
    """Return the number of logical CPU slots of an isolated local Ray."""
    from verl_patches.trainer.configuration_checks import required_ray_slots

    return config.ray_init.num_cpus or max(os.cpu_count() or 1, required_ray_slots(config))


def _note(config: DictConfig, event: str) -> None:
    from verl_patches.features.measure.run_files import RunFiles

    RunFiles(config.actor_rollout_ref.overlay.measure.output_dir).note(event)


def prepare_worker() -> None:
    """Load the overlay. Ray calls this in every worker process before anything else."""
    import verl_patches.prelude_patch  # noqa: F401
    from verl_patches.trainer.isolated_ray import name_shared_memory

    name_shared_memory()


def prepare_worker_of_own_ray() -> None:
    """Prepare a worker of an isolated local Ray, whose stores listen on loopback only."""
    prepare_worker()
    from verl_patches.trainer.isolated_ray import confine_worker

    confine_worker()
