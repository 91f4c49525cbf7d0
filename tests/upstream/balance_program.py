"""Ranks that check whether MindSpeed-LLM deals experts out in turn if the overlay's key says so, in one layout.

FOLDER is as for engine_program. Each rank writes the number of tokens of each expert, for every call of its routers.
"""

import verl_patches.prelude_patch  # noqa: F401

# isort: split
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from post_training.models.router_balance import dealt_experts
from tests.post_training.models.megatron.training_models_program import Layout, Trial, start_layout
from tests.upstream.engine_program import start_engine
from verl_patches.features.router_balance.feature import ROUTER_BALANCE


def main(folder: Path) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    request = json.loads((folder / "request.json").read_text())
    layout, forced = Layout(**request["layout"]), request["forced"]
    start_engine(folder / "checkpoint", layout, True, f"{ROUTER_BALANCE.switch}={forced}")
    dist.init_process_group("hccl")
    reference = torch.load(folder / "reference.pt", weights_only=True)
    start_layout(layout)
    trial = Trial(folder / "checkpoint", layout)
    chosen: list[torch.Tensor] = []
    for module in trial.module.modules():
        if type(module).__name__ == "TopKRouter":
            module.register_forward_hook(lambda router, given, output: chosen.append(output[1].cpu()))
    trial.run(reference["batch"], backward=True, together=True)
    experts = trial.hf_config.n_routed_experts
    calls = [
        {
            "shares": each.flatten().bincount(minlength=experts).tolist(),
            "dealt": torch.equal(each.long(), dealt_experts(*each.shape, experts, each.device)),
        }
        for each in chosen
    ]
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(calls))
    dist.barrier()
