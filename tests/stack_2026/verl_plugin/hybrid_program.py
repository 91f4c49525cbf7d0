"""Run a hybrid optimizer, half of which counts updates in its groups as MindSpeed's AdamW does; write `0.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch_npu  # noqa: F401
import torch_npu.contrib.transfer_to_npu  # noqa: F401  (Megatron-core asks for torch.cuda)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from verl_plugin.resume.hybrid_optimizer import ResumableHybridOptimizer

LOADED, UPDATES = 3, 2


class CountsInGroup(torch.optim.Optimizer):
    """Adam with the update count in the parameter group."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for weight in group["params"]:
                state = self.state[weight]
                state["exp_avg"] = state.get("exp_avg", 0) * 0.9 + weight.grad * 0.1
                state["exp_avg_sq"] = state.get("exp_avg_sq", 0) * 0.99 + weight.grad**2 * 0.01
                weight -= group["lr"] * state["exp_avg"] / (1 - 0.9 ** group["step"])


def main(folder: Path) -> None:
    torch.npu.set_device(0)
    weights = [torch.nn.Parameter(torch.ones(4, device="npu")) for _ in range(2)]
    classes = {"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": CountsInGroup}
    optimizer: HybridDeviceOptimizer = HybridDeviceOptimizer(weights, 0.5, param_update_in_fp32=True, lr=0.1, **classes)
    optimizer.__class__ = ResumableHybridOptimizer
    optimizer.create_states(LOADED)
    for _ in range(UPDATES):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    on_host, on_die = optimizer.cpu_optimizers[0], optimizer.gpu_optimizer
    counts = [int(state["step"]) for state in on_host.state.values()], [each["step"] for each in on_die.param_groups]
    optimizer._move_new_state_to_right_device()
    places = [{state["exp_avg"].device.type for state in each.state.values()} for each in (on_host, on_die)]
    found = {"counts": [*counts[0], *counts[1]], "places": [sorted(each) for each in places]}
    (folder / "0.json").write_text(json.dumps(found))
