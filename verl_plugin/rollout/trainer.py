"""A mixin for verl's trainers that starts servers whose engines may have sync windows over several nodes."""

from __future__ import annotations

from typing import Any

from post_training.report.run_folder import at
from verl_plugin.rollout.sync_window import EXECUTOR, EXECUTOR_KEY


class ServesWindows:
    """Comes before a trainer of verl, and before `DetectsHangs`.

    `HeartbeatServer` extends `WindowServer`, so the servers that `DetectsHangs` registers later replace these.
    """

    config: Any

    def init(self) -> None:
        """As upstream."""
        if at(self.config, EXECUTOR_KEY) == EXECUTOR:
            from verl.workers.rollout.replica import RolloutReplicaRegistry

            RolloutReplicaRegistry.register("vllm", _replica)
        super().init()  # type: ignore[misc]  # of the trainer that this extends


def _replica() -> type:
    from verl_plugin.rollout.servers import WindowReplica

    return WindowReplica
