"""A negative control, loaded by VERL_USE_EXTERNAL_MODULES: in training, image tokens have text positions."""

from typing import Any

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

_upstream = AgentLoopWorker._compute_position_ids


def _positions_of_text(self: AgentLoopWorker, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return positions [1, 4, tokens] with text positions in all rows; upstream's last three have image coordinates."""
    positions = _upstream(self, *args, **kwargs)
    return positions[:, :1].expand_as(positions).clone()


AgentLoopWorker._compute_position_ids = _positions_of_text
