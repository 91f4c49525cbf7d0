"""verl's agent loops, with expert numbers of one byte wherever one byte is enough.

vLLM returns numbers of up to 256 experts as uint8, and verl widens them to int16: twice the bytes through
TransferQueue, 16 instead of 8 GB for a step of 512 x 16 samples of 2,000 tokens with DeepSeek-V3, which has 61 layers
and 8 experts a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from verl.experimental.agent_loop import SingleTurnAgentLoop, ToolAgentLoop
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register


class CompactOutput(AgentLoopOutput):
    """verl's output of a loop, with expert numbers as wide as vLLM returned them."""

    def as_dict(self) -> dict[str, Any]:
        """As upstream; torch has few operators for uint16, so numbers above 255 stay int16."""
        output = super().as_dict()
        if getattr(self.routed_experts, "dtype", None) == np.uint8:
            output["routed_experts"] = output["routed_experts"].to(torch.uint8)
        return output


def compact(output: Any) -> Any:
    """Return a loop's output, or each of several outputs, as `CompactOutput`."""
    if isinstance(output, list):
        return [compact(each) for each in output]
    values = {name: getattr(output, name) for name in type(output).model_fields}
    return CompactOutput.model_construct(output.model_fields_set, **values)


@register("single_turn_agent")
class CompactSingleTurn(SingleTurnAgentLoop):
    """verl's loop of one answer."""

    async def run(self, *arguments: Any, **named: Any) -> Any:
        """As upstream."""
        return compact(await super().run(*arguments, **named))


@register("tool_agent")
class CompactTools(ToolAgentLoop):
    """verl's loop with tools."""

    async def run(self, *arguments: Any, **named: Any) -> Any:
        """As upstream."""
        return compact(await super().run(*arguments, **named))
