"""A negative control, which VERL_USE_EXTERNAL_MODULES loads: in training, tokens of images have positions of text."""

from typing import Any

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

_upstream = AgentLoopWorker._compute_position_ids


def _positions_of_text(self: AgentLoopWorker, *args: Any, **kwargs: Any) -> torch.Tensor:
    """[1, 4, tokens]: the first row counts tokens, and upstream's other three have rows and columns of images."""
    positions = _upstream(self, *args, **kwargs)
    return positions[:, :1].expand_as(positions).clone()


AgentLoopWorker._compute_position_ids = _positions_of_text
