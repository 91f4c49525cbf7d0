"""The update's own log-probs in verl's FSDP2 engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from verl.utils import tensordict_utils as tu

from verl_plugin.onpolicy.update import ENTROPY, OWN_ENTROPY, OnPolicyUpdate


class OnPolicyFSDP2(OnPolicyUpdate):
    """verl's engine; an update computes its entropy without gradient, so that no copy of the logits is kept."""

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any) -> Any:
        """As upstream, with the entropy beside the log-probs."""
        if not self._takes_own:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)  # type: ignore[misc]  # of the engine
        logits = SimpleNamespace(logits=output.logits.detach())
        tu.assign_non_tensor_data(micro_batch, "calculate_entropy", True)
        with torch.no_grad():
            own = super().prepare_model_outputs(logits, output_args, micro_batch, logits_processor_func)  # type: ignore[misc]  # of the engine
        tu.assign_non_tensor_data(micro_batch, "calculate_entropy", False)
        found = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)  # type: ignore[misc]  # of the engine
        return found | {OWN_ENTROPY: own[ENTROPY]}
