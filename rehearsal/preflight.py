"""The checks that a rehearsal makes before it starts anything; each fault is reported in one sentence."""

import json
import math
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from post_training.data.inspection import Expectations, check_file
from post_training.models.families import family_of
from rehearsal.plan import CHIPS, RehearsalPlan
from rehearsal.tiny_model.architecture import TINY_MODELS

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Bytes a parameter of training in mixed precision with Adam: bf16 weight, fp32 gradient, fp32 weight, two fp32 moments.
_TRAINING_BYTES = 2 + 4 + 4 + 4 + 4
# Bytes a parameter of the colocated rollout's copy in bf16.
_ROLLOUT_BYTES = 2


class PreflightError(ValueError):
    """The run cannot work; the message is one sentence with the thing, its value and the remedy."""


def compose_checked(plan: RehearsalPlan) -> Mapping[str, Any]:
    """Compose the run's configuration, check it and its needs of this machine, and return it.

    The tiny model need not exist yet: its sizes are known.

    Raises:
        PreflightError: an override is unknown or malformed, or the configuration cannot run.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from verl_patches.features.settings import SettingsError
    from verl_patches.trainer.configuration_checks import (
        ConfigurationError,
        check_chip,
        check_configuration,
        check_machine,
    )
    from verl_patches.trainer.configuration_checks.composition import sentence_of
    from verl_patches.trainer.configuration_checks.values import resolved
    from verl_patches.trainer.main_ppo import compose

    try:
        config = compose(plan.job.configuration, plan.overrides)
        to_make = not is_whole(plan.checkpoint) and _model_path(config) == str(plan.checkpoint)
        described = {"model_type": plan.options.model_type, **TINY_MODELS[plan.options.model_type]}
        check_configuration(config, described if to_make else None)
        # The driver that checks the machine runs on none of the plan's dies.
        check_chip(resolved(config), CHIPS[plan.options.chip][0])
        check_machine(config, model_is_there=not to_make)
    except (HydraException, OmegaConfBaseException) as error:
        raise PreflightError(sentence_of(error)) from error
    except (ConfigurationError, SettingsError) as error:
        raise PreflightError(str(error)) from error
    check_steps(config)
    return config


def _model_path(config: "DictConfig") -> str | None:
    """Return the model's path, even if the rest of the configuration is invalid."""
    from omegaconf import OmegaConf

    return OmegaConf.select(config, "actor_rollout_ref.model.path", throw_on_resolution_failure=False)


def check_steps(config: Mapping[str, Any]) -> None:
    """Check that the number of steps is given, which the display needs.

    Raises:
        PreflightError: it is missing.
    """
    if config["trainer"]["total_training_steps"] is None:
        raise PreflightError(
            "trainer.total_training_steps=null is invalid. Set it to the number of steps, or pass --steps."
        )


def check_device_memory(parameters: int, dies: int, capacity_mb: int) -> None:
    """Check that the model's state fits into the dies at all; activations and KV cache come on top.

    Raises:
        PreflightError: ``parameters`` spread evenly over ``dies`` need more than ``capacity_mb`` MiB a die.
    """
    needed_mb = parameters * (_TRAINING_BYTES + _ROLLOUT_BYTES) / dies / 2**20
    if needed_mb > capacity_mb:
        raise PreflightError(
            f"--device-memory={capacity_mb} is invalid: weights, gradients and optimizer of {parameters:,} parameters "
            f"take {needed_mb:.0f} MiB on each of {dies} dies before any activation. Set it to at least "
            f"{2 * needed_mb:.0f}."
        )


def count_parameters(checkpoint: Path) -> int:
    """Count the parameters in a folder's safetensors files from their headers alone.

    Raises:
        PreflightError: a file is truncated, or no safetensors file.
    """
    return sum(
        math.prod(entry["shape"])
        for path in sorted(checkpoint.glob("*.safetensors"))
        for entry in _tensors(path).values()
    )


def is_whole(checkpoint: Path) -> bool:
    """Whether a folder holds a model's complete files, judged by lengths and JSON, not by the weights' values."""
    weights = sorted(checkpoint.glob("*.safetensors"))
    described = sorted(checkpoint.glob("*.json"))
    try:
        for path in weights:
            _tensors(path)
        for path in described:
            json.loads(path.read_bytes())
    except (PreflightError, ValueError, OSError):
        return False
    return bool(weights) and checkpoint / "config.json" in described


def _tensors(path: Path) -> dict[str, Any]:
    """Return the tensors in a safetensors file's header, if the file is complete: 8 bytes of length, header, data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length <= size else {}
            header.pop("__metadata__", None)
            ends = [entry["data_offsets"][1] for entry in header.values()]
        except (struct.error, ValueError, AttributeError, KeyError, TypeError) as error:
            raise PreflightError(
                f"{path} is not a safetensors file ({error}). Copy or make the model again."
            ) from error
    if size != (expected := 8 + length + max(ends, default=0)):
        raise PreflightError(
            f"{path} is {size} bytes long, but its header says {expected}. Copy or make the model again."
        )
    return header


def check_output(output: Path) -> None:
    """Check that a run's folder holds no other run and can be created and written. Leaves nothing behind.

    Raises:
        PreflightError: the folder is not empty, or cannot be written.
    """
    made: list[Path] = []
    try:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise PreflightError(
                f"--output={output} is invalid: it exists and is not an empty folder. Choose another one."
            )
        for folder in reversed([output, *output.parents]):
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        with tempfile.TemporaryFile(dir=output) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        raise PreflightError(
            f"--output={output} cannot be written ({error.strerror}). Choose a writable folder."
        ) from error
    finally:
        for folder in reversed(made):
            folder.rmdir()


def check_rows(plan: RehearsalPlan, config: Mapping[str, Any]) -> None:
    """Checks the parquet files, and that they hold at least one batch.

    Raises:
        DataError: a file is unusable.
        PreflightError: there are fewer training rows than one step takes.
    """
    has_images = family_of(TINY_MODELS[plan.options.model_type]).reads_images
    expected = Expectations(image_key=config["data"].get("image_key", "images") if has_images else None)
    rows, batch = check_file(plan.train_data, expected), config["data"]["train_batch_size"]
    check_file(plan.test_data, expected)
    if rows < batch:
        raise PreflightError(
            f"data.train_batch_size={batch} is invalid: the data has {rows} training rows. Use more data, or a smaller "
            f"batch after --, such as data.train_batch_size={config['trainer']['n_gpus_per_node']}."
        )
