"""The checks that a rehearsal makes before it starts anything: one sentence for whatever cannot work."""

import json
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from scripts.rehearsal.plan import Plan
from verl_patches.features.dataset.inspection import check_file

# Bytes a parameter of training in mixed precision with Adam: bf16 weight, fp32 gradient, fp32 weight, two fp32 moments.
_TRAINING_BYTES = 2 + 4 + 4 + 4 + 4
# Bytes a parameter of the colocated rollout's copy in bf16.
_ROLLOUT_BYTES = 2


class PreflightError(ValueError):
    """The run cannot work; the message is one sentence with the thing, its value and the remedy."""


def compose_checked(plan: Plan) -> Mapping[str, Any]:
    """Composes the run's configuration and checks it; returns it.

    Raises:
        PreflightError: an override is unknown or malformed, or the configuration cannot run.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from verl_patches.features.configuration_checks import ConfigurationError, check_configuration
    from verl_patches.features.settings import SettingsError
    from verl_patches.trainer.main_ppo import compose

    try:
        config = compose("rehearsal", plan.overrides)
        check_configuration(config)
    except (ConfigurationError, SettingsError, HydraException, OmegaConfBaseException) as error:
        raise PreflightError(" ".join(str(error).split())) from error
    check_steps(config)
    check_ports(config)
    return config


def check_steps(config: Mapping[str, Any]) -> None:
    """Checks that the number of steps is one.

    Raises:
        PreflightError: it is no whole number, or below 1.
    """
    steps = config["trainer"]["total_training_steps"]
    if not isinstance(steps, int) or steps < 1:
        raise PreflightError(
            f"trainer.total_training_steps={steps} is no number of steps: give a whole number from 1 on."
        )


def check_ports(config: Mapping[str, Any]) -> None:
    """Checks that every port which the configuration names is free on this machine.

    Raises:
        PreflightError: a port is out of range or in use.
    """
    for key, value in _leaves(config):
        if key.rpartition(".")[2].endswith("port") and isinstance(value, int) and value != 0:
            _check_port(key, value)


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key in node:
        value = node[key]
        if isinstance(value, Mapping) or hasattr(value, "items"):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_port(key: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise PreflightError(f"{key}={port} is no port: choose one from 1024 to 65535, or 0 for any free one.")
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PreflightError(
                f"{key}={port} cannot be used ({error.strerror}): stop what uses the port, or choose another one."
            ) from error


def check_device_memory(parameters: int, dies: int, capacity_mb: int) -> None:
    """Checks that the model's state fits into the dies at all; activations and KV cache come on top.

    Raises:
        PreflightError: ``parameters`` spread evenly over ``dies`` need more than ``capacity_mb`` MiB a die.
    """
    needed_mb = parameters * (_TRAINING_BYTES + _ROLLOUT_BYTES) / dies / 2**20
    if needed_mb > capacity_mb:
        raise PreflightError(
            f"--device-memory {capacity_mb} is too little: weights, gradients and optimizer of {parameters:,} "
            f"parameters take {needed_mb:.0f} MiB on each of {dies} dies before any activation; give at least "
            f"{2 * needed_mb:.0f}."
        )


def count_parameters(checkpoint: Path) -> int:
    """Counts the parameters in a folder's safetensors files from their headers alone."""
    total = 0
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                size = 1
                for extent in entry["shape"]:
                    size *= extent
                total += size
    return total


def check_output(output: Path) -> None:
    """Checks that a run's folder holds no other run, and that it can be made and written. Leaves nothing behind.

    Raises:
        PreflightError: there is something in it, or it cannot be written.
    """
    made: list[Path] = []
    try:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise PreflightError(f"{output} exists and is not an empty folder: choose another --output.")
        for folder in reversed([output, *output.parents]):
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        with tempfile.TemporaryFile(dir=output) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        raise PreflightError(
            f"--output {output} cannot be written ({error.strerror}): choose a folder that takes files."
        ) from error
    finally:
        for folder in reversed(made):
            folder.rmdir()


def check_rows(plan: Plan, config: Mapping[str, Any]) -> None:
    """Checks the parquet files, and that they hold at least one batch.

    Raises:
        DataError: a file is unusable.
        PreflightError: there are fewer training rows than one step takes.
    """
    rows, batch = check_file(plan.train_data), config["data"]["train_batch_size"]
    check_file(plan.test_data)
    if rows < batch:
        raise PreflightError(
            f"The data give {rows} training rows, and one step takes data.train_batch_size={batch}: give more data, or "
            f"a smaller batch after --, such as data.train_batch_size={config['trainer']['n_gpus_per_node']}."
        )
