"""All random states of a process, as tensors and JSON; nothing is pickled."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping

import numpy
import torch

from post_training.checkpoint.training_files import RANDOM

HOST, DEVICE, TRACKER = f"{RANDOM}host", f"{RANDOM}device", f"{RANDOM}tracker/"
PYTHON, NUMPY = "python_random", "numpy_random"
States = tuple[dict[str, torch.Tensor], dict[str, str]]


def random_states(tracked: Mapping[str, torch.Tensor]) -> States:
    """Return the random states as (tensors, texts): torch on the host and the device; Python and NumPy.

    Args:
        tracked: the states of Megatron's tracker by name, added to the tensors.
    """
    tensors = {HOST: torch.get_rng_state(), DEVICE: torch.npu.get_rng_state()}
    return tensors | {TRACKER + name: state for name, state in tracked.items()}, _python_states()


def restore_random_states(
    tensors: Mapping[str, torch.Tensor],
    texts: Mapping[str, str],
    set_tracked: Callable[[dict[str, torch.Tensor]], None],
) -> None:
    """Restore what `random_states` returned; `set_tracked` takes the states of Megatron's tracker."""
    _restore_python_states(texts)
    torch.set_rng_state(tensors[HOST])
    torch.npu.set_rng_state(tensors[DEVICE])
    set_tracked({name.removeprefix(TRACKER): state for name, state in tensors.items() if name.startswith(TRACKER)})


def driver_random_states() -> dict[str, str]:
    """Return the random states of a process without a device, as JSON values."""
    return _python_states() | {HOST: torch.get_rng_state().numpy().tobytes().hex()}


def restore_driver_random_states(states: Mapping[str, str]) -> None:
    """Restore what `driver_random_states` returned."""
    _restore_python_states(states)
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states[HOST]), dtype=torch.uint8))


def _python_states() -> dict[str, str]:
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()
    return {
        PYTHON: json.dumps(random.getstate()),
        NUMPY: json.dumps([kind, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)]),
    }


def _restore_python_states(texts: Mapping[str, str]) -> None:
    version, internal, gauss_next = json.loads(texts[PYTHON])
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = json.loads(texts[NUMPY])
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
