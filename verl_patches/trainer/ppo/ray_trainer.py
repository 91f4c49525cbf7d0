"""Turns verl's trainer into the overlay's at construction, whatever program makes it and whatever it is imported as."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features import settings
from verl_patches.features.compatibility.feature import SETTINGS

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

_TRAINER = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"
# Methods whose contract the overlay's trainer keeps, or that it calls.
_METHODS = (
    "fit",
    "init_workers",
    "_create_dataloader",
    "_balance_batch",
    "_validate",
    "_dump_generations",
    "_save_checkpoint",
    "_load_checkpoint",
)


@wrap(
    f"{_TRAINER}.__init__",
    feature=SETTINGS,
    evidence="executed",
    relies_on=[f"{_TRAINER}.{name}" for name in _METHODS],
    why="the driver rejects invalid configurations before any worker starts, and trains in stages that features "
    "extend, whereas verl's loop is one function",
)
def init(upstream: Callable[..., None], self: RayPPOTrainer, config: DictConfig, *args: Any, **kwargs: Any) -> None:
    from verl_patches.trainer.configuration_checks import check_configuration
    from verl_patches.trainer.ppo.trainer import overlaid

    if "overlay" not in config.actor_rollout_ref:  # the program is neither ours nor verl's own command
        from omegaconf import OmegaConf

        from verl_patches.trainer.verl_command import completed

        config = completed(config)
        OmegaConf.resolve(config)  # as verl's task runner has done with the rest
    settings.activate(check_configuration(config))
    self.__class__ = overlaid(type(self))
    upstream(self, config, *args, **kwargs)
