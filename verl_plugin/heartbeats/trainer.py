"""A mixin for verl's trainers that requests heartbeats, runs the hang detector, and ends a run that hangs."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from post_training.hang_detection.driver import watching
from post_training.hang_detection.ray_store import RayStore
from post_training.hang_detection.records import RunRecords
from post_training.hang_detection.signs import NO_PHASE, TRAINER, process_signs
from verl_plugin.heartbeats.sending import start
from verl_plugin.heartbeats.settings import HangDetection

DRIVER = "driver"


class DetectsHangs:
    """Mixin for a trainer of verl. While the trainer samples, only the servers are checked for hangs."""

    config: Any
    global_steps: int
    _detection: ExitStack
    _sampling: AbstractContextManager[None]

    def init(self) -> None:
        """As upstream; the detector runs from here to the end of `fit`."""
        plain: Any = OmegaConf.to_container(self.config, resolve=True)
        settings = HangDetection.from_config(plain)
        self._detection = ExitStack()
        if settings.enabled:
            _serve_with_heartbeats()
            RayStore().keep_settings(settings.packed())
            process_signs().step = lambda: getattr(self, "global_steps", None)
            start(TRAINER)
            dies = plain["trainer"]["nnodes"] * plain["trainer"]["n_gpus_per_node"]
            records = RunRecords(Path(settings.folder))
            self._detection.enter_context(watching(settings, dies, records, isolated_ray=False, end=_end))
            self._detection.enter_context(process_signs().phase(DRIVER))
        super().init()  # type: ignore[misc]  # of the trainer that this extends

    def fit(self, *arguments: Any, **named: Any) -> None:
        """As upstream."""
        with self._detection:
            super().fit(*arguments, **named)  # type: ignore[misc]  # of the trainer that this extends

    def on_sample_begin(self) -> None:
        """As upstream."""
        super().on_sample_begin()  # type: ignore[misc]  # of the trainer that this extends
        self._sampling = process_signs().phase(NO_PHASE)
        self._sampling.__enter__()

    def on_sample_end(self) -> None:
        """As upstream."""
        self._sampling.__exit__(None, None, None)
        super().on_sample_end()  # type: ignore[misc]  # of the trainer that this extends


def _serve_with_heartbeats() -> None:
    """Replace verl's server by the one with heartbeats in verl's own registry."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def replica() -> type:
        from verl_plugin.heartbeats.rollout import HeartbeatReplica

        return HeartbeatReplica

    RolloutReplicaRegistry.register("vllm", replica)


def _end() -> None:
    """End the run: verl's main program notices that its trainer died, and Ray ends the workers."""
    print("error: the run hangs (see above), and was ended", file=sys.stderr, flush=True)
    os._exit(1)
