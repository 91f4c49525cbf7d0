"""Random numbers: one generator for each device."""

from collections.abc import Iterable

import torch
from torch import Tensor

from npu_emulator import _C

from .utils import DeviceLike, _get_device_index


def get_rng_state(device: DeviceLike = "npu") -> Tensor:
    return _C.default_generator(_get_device_index(device)).get_state()


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state(index) for index in range(_C.device_count())]


def set_rng_state(new_state: Tensor, device: DeviceLike = "npu") -> None:
    _C.default_generator(_get_device_index(device)).set_state(new_state.cpu())


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int | float) -> None:
    """Seed the generator of the current device; without any device, do nothing."""
    if _C.device_count():
        _C.default_generator(_C.current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int | float) -> None:
    for index in range(_C.device_count()):
        _C.default_generator(index).manual_seed(int(seed))


def seed() -> None:
    _C.default_generator(_C.current_device()).seed()


def seed_all() -> None:
    manual_seed_all(torch.default_generator.seed())


def initial_seed() -> int:
    return _C.default_generator(_C.current_device()).initial_seed()


class _DefaultGenerators:
    """The generators by device index, made when asked for."""

    def __getitem__(self, index: int) -> torch.Generator:
        return _C.default_generator(index)

    def __len__(self) -> int:
        return _C.device_count()


default_generators = _DefaultGenerators()
